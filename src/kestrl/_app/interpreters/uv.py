"""The program `uv`, which makes environments, resolves requirements and installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kestrl._app.interpreters.places import without_python
from kestrl.errors import UserInputError

LAST_LINES = 4
"""Lines of uv's output that a message shows."""
LONGEST_LINE = 200


def uv_program() -> str:
    """Path of uv: that of this environment, or that on the PATH.

    Raises:
        UserInputError: There is none.
    """
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        program = shutil.which("uv")
    if program is None:
        raise UserInputError("uv is missing, which makes environments of Python: pip install uv")
    return program


def run_uv(*arguments: str | Path, folder: Path, purpose: str, keep_open: Sequence[int] = ()) -> None:
    """Runs uv in a folder that has no project of the user's.

    Args:
        arguments: Those of uv.
        folder: Working directory.
        purpose: What fails if uv does.
        keep_open: Descriptors that uv inherits: locks that are held until it ends, also if this process is killed.

    Raises:
        UserInputError: It failed; the message has the end of its output.
    """
    process = subprocess.run(  # noqa: S603 - found above
        [uv_program(), *map(str, arguments)],
        cwd=folder,
        env=without_python(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        pass_fds=keep_open,
    )
    if process.returncode != 0:
        lines = [" ".join(line.split()) for line in process.stderr.splitlines() if line.strip()]
        reason = "; ".join(line[:LONGEST_LINE] for line in lines[-LAST_LINES:]) or f"uv ended with {process.returncode}"
        raise UserInputError(f"{purpose}: {reason}")
