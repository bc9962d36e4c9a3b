"""The Go toolchain: that of the PATH, or else the one that `make kit` installs for a checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

INSTALLED = Path(__file__).parents[1] / ".tools" / "bin"


def path_with_go() -> str:
    """The PATH for programs that call `go`. The checkout's folder comes last, since it has a Python, too."""
    return os.pathsep.join(filter(None, [os.environ.get("PATH"), str(INSTALLED)]))


def find_go() -> str | None:
    """The program `go`; None if there is none."""
    return shutil.which("go", path=path_with_go())


def go() -> str:
    """The program `go`.

    Raises:
        FileNotFoundError: There is none; the message says what installs one.
    """
    program = find_go()
    if program is None:
        raise FileNotFoundError(f"there is no go on the PATH or in {INSTALLED}: make kit installs one")
    return program
