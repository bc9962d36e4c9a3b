"""Copies a starter into a new folder."""

from __future__ import annotations

import shutil
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import kestrl._app.starters
from kestrl.errors import UserInputError

STARTERS = ("tool", "reward-only", "email", "langgraph", "environment")
SUFFIX = ".template"
"""What the name of a file of Python has in this package, since it is none of its modules."""
LONGEST = 80


def write_starter(name: str, folder: Path) -> None:
    """Writes a starter: all of it, or nothing.

    Raises:
        UserInputError: There is no such starter, or the folder holds something.
    """
    if name not in STARTERS:
        raise UserInputError(f"--template: {name[:LONGEST]!r} is none of {', '.join(STARTERS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"DIR: {folder} is there and not an empty folder; name a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kestrl-new-", dir=folder.parent) as beside:
        copy = Path(beside) / "starter"
        copy.mkdir()
        with as_file(files(kestrl._app.starters) / "files" / name) as source:
            for file in sorted(source.iterdir()):
                shutil.copyfile(file, copy / file.name.removesuffix(SUFFIX))
        copy.rename(folder)  # also over an empty folder
