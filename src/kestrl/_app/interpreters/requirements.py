"""Environments of Python for lists of requirements, made once each and kept: `ENVIRONMENTS/<digest>/bin/python`.

The digest is that of the requirements and of the Python that they are for, so that a changed list is another
environment, and a known one needs no network.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kestrl._app.interpreters.making import make_environment
from kestrl._app.interpreters.places import data_folder, locked, remove_unfinished
from kestrl.errors import UserInputError
from kestrl.terminal import safe_line

VARIABLE = "KESTRL_ENVIRONMENTS"
"""Environment variable with the folder of environments."""
RECORD = "environment.json"
DIGITS = 16
SHOWN = 3
"""Requirements that a line of progress names."""


def environments_folder() -> Path:
    """Folder of environments: that of the variable, or one in the user's data folder."""
    return data_folder("environments", VARIABLE)


def say(line: str) -> None:
    """Shows a line of progress of a command, on standard error."""
    print(safe_line(line), file=sys.stderr, flush=True)  # noqa: T201 - as the first line says


def environment_python(
    requirements: Sequence[str], *, python: str | None, field: str, say: Callable[[str], None]
) -> Path:
    """Interpreter of the environment with these requirements, which is made if it is not there.

    Args:
        requirements: As pip takes them; none for an environment with Python alone.
        python: Version of Python, such as 3.12; None for the one that runs this program.
        field: Field of the manifest with the requirements, for messages.
        say: Shows a line of progress.

    Raises:
        UserInputError: It cannot be made; the message has the field and the end of uv's output.
    """
    folder = environments_folder()
    if not folder.is_absolute():
        raise UserInputError(f"{VARIABLE}: {folder} is relative, as there is no home folder; name another folder")
    record = _record(requirements, python)
    name = hashlib.sha256(record.encode()).hexdigest()[:DIGITS]
    path = folder / name
    if (path / RECORD).is_file():
        return path / "bin" / "python"
    shortened = _shown(requirements)
    with locked(folder, name, lambda: say(f"waiting for another process that installs {shortened}")) as handle:
        if not (path / RECORD).is_file():
            remove_unfinished(folder, name)
            say(f"installing {shortened} in {path}")
            make_environment(
                path,
                python=python or sys.executable,
                requirements="".join(f"{requirement}\n" for requirement in requirements),
                exact=False,
                record=(RECORD, record),
                purpose=f"{field}: {shortened} cannot be installed",
                handle=handle,
            )
    return path / "bin" / "python"


def _record(requirements: Sequence[str], python: str | None) -> str:
    """What an environment is made of, in a form that is the same for the same."""
    version = python or platform.python_version()
    parts = {"python": version, "machine": platform.machine(), "requirements": sorted(set(requirements))}
    return json.dumps(parts, sort_keys=True)


def _shown(requirements: Sequence[str]) -> str:
    names = ", ".join(requirements[:SHOWN]) or "Python without packages"
    unlisted = len(requirements) - SHOWN
    return names if unlisted <= 0 else f"{names} and {unlisted} more"
