"""The shell blocks of docs/try-on-kubernetes.md, by section."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "try-on-kubernetes.md"
HERE, ELSEWHERE = "On this machine", "On kind or minikube"


def section(heading: str) -> str:
    """The text below a heading of the second level."""
    return re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1 + (HERE, ELSEWHERE).index(heading)]


def commands(heading: str) -> list[str]:
    """The commands of a section's shell blocks, in order; continued lines and loops are one."""
    blocks = re.findall(r"^```sh\n(.*?)^```", section(heading), re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\\n\s*", "", "".join(blocks))
    return re.findall(r"^(?:for .*?^done|\S.*?)$", text, re.MULTILINE | re.DOTALL)
