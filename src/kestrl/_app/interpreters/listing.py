"""Rows that a program in an environment's own interpreter lists."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kestrl._app.interpreters.places import without_python
from kestrl._shared.environments import link_sources
from kestrl.errors import UserInputError

MODULE = "kestrl_tools.environments.listing"
SECONDS = 1800.0
"""Time limit: some generators search for every task."""
MARK = "error: "


def listed_rows(
    python: str, wanted: Mapping[str, Any], *, field: str, python_path: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """The rows of a request, listed in an interpreter.

    Args:
        python: The interpreter.
        wanted: The request.
        field: What the request is named, for messages.
        python_path: Folders with the user's code.

    Raises:
        UserInputError: The tasks cannot be listed.
    """
    with tempfile.TemporaryDirectory(prefix="kestrl-listing-") as name:
        folder, out = Path(name), Path(name) / "rows.jsonl"
        sources = folder / "sources"
        sources.mkdir()
        link_sources(sources)
        try:
            ended = subprocess.run(  # noqa: S603 - an interpreter that we made
                [python, "-m", MODULE, "--out", str(out)],
                input=json.dumps(wanted),
                env={**without_python(os.environ), "PYTHONPATH": os.pathsep.join(map(str, (sources, *python_path)))},
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserInputError(f"{field}: its tasks were not listed within {SECONDS:g} s; ask for fewer") from error
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"]
            raise UserInputError(f"{field}: its tasks cannot be listed: {lines[-1].removeprefix(MARK)}")
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
