"""Rows that a program in an environment's own interpreter lists."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kestrl._shared.environments import link_sources
from kestrl._shared.processes.guarded import GuardedProcess, ending, kept_variables
from kestrl.errors import UserInputError

MODULE = "kestrl_tools.environments.listing"
SECONDS = 1800.0
"""Time limit: some generators search for every task."""
MARK = "error: "


def listed_rows(
    python: str,
    request: Mapping[str, Any],
    *,
    field: str,
    python_path: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The rows of a request, listed in an interpreter by code of others, which inherits no credential.

    Args:
        python: The interpreter.
        request: The request.
        field: What the request is named, for messages.
        python_path: Folders with the user's code.
        variables: Environment variables beside `KEPT_VARIABLES`.

    Raises:
        UserInputError: The tasks cannot be listed.
    """
    with tempfile.TemporaryDirectory(prefix="kestrl-listing-") as name:
        folder, out = Path(name), Path(name) / "rows.jsonl"
        sources = folder / "sources"
        sources.mkdir()
        link_sources(sources)
        paths = os.pathsep.join(map(str, (sources, *python_path)))
        status, errors = _ended(
            [python, "-m", MODULE, "--out", str(out)],
            json.dumps(request),
            {**kept_variables(), **(variables or {}), "PYTHONPATH": paths},
            folder,
            field,
        )
        if status != 0:
            lines = errors.strip().splitlines() or [f"it ended with {ending(status)}"]
            raise UserInputError(f"{field}: its tasks cannot be listed: {lines[-1].removeprefix(MARK)}")
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _ended(
    command: Sequence[str], text: str, variables: Mapping[str, str], folder: Path, field: str
) -> tuple[int, str]:
    """Exit status and errors of a program, of which nothing runs any more.

    Raises:
        UserInputError: It did not end within `SECONDS`.
    """
    request_file, log = folder / "wanted.json", folder / "errors"
    request_file.write_text(text, encoding="utf-8")
    with request_file.open("rb") as stdin, log.open("wb") as errors:
        program = GuardedProcess.start(
            command, variables=variables, stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors, folder=folder
        )
    try:
        status = program.wait(SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserInputError(f"{field}: its tasks were not listed within {SECONDS:g} s; ask for fewer") from error
    finally:
        program.release()
        program.wait()
    return status, log.read_text(encoding="utf-8", errors="replace")
