"""An agent, an environment and a tool of a user, as their images have them. They need the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any


def agent(row: dict[str, Any], base_url: str, key: str, deadline: float) -> dict[str, Any]:
    """Asks once; earns what its answer has of the letter e."""
    body = json.dumps({"model": "policy", "messages": row["messages"], "max_tokens": 16}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"] or ""
    return {"reward": _share(text), "info": {"host": os.uname().nodename}}


class Letters:
    """Earns what the model's turn has of the letter e."""

    def reset(self) -> str:
        self.said = ""
        return "Write."

    def act(self, text: str) -> str:
        self.said = text
        return "Thank you."

    def get_reward(self) -> float:
        return _share(self.said)


class Shelf:
    """Shows what a file says, which another pod has fetched.

    Args:
        file: Path of the file.
    """

    def __init__(self, file: str) -> None:
        self._text = Path(file).read_text()

    def reset(self) -> str:
        return self._text

    def look(self) -> str:
        """Says what is on the shelf."""
        return self._text


def _share(text: str) -> float:
    return text.count("e") / max(1, len(text))
