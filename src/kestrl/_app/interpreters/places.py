"""Folders with environments of Python, the locks of their names, and who runs in one.

```
FOLDER/NAME            an environment: bin/python, lib, ...
FOLDER/.locks/NAME     locked (flock): exclusively by what makes or removes it, shared by a run that uses it
FOLDER/.making-NAME-*  an unfinished one, which the next attempt at the name removes
```
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PYTHON_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX"})
"""Variables of the shell's interpreter, which another one does not inherit."""
LOCKS = ".locks"


def without_python(inherited: Mapping[str, str]) -> dict[str, str]:
    """What a program inherits that works on another interpreter."""
    return {key: value for key, value in inherited.items() if key not in PYTHON_VARIABLES}


def data_folder(name: str, variable: str, environment: Mapping[str, str] = os.environ) -> Path:
    """A folder of this program: that of a variable, or one in the user's data folder.

    Args:
        name: Its name in the data folder.
        variable: Environment variable with another folder.
        environment: The environment variables.
    """
    if folder := environment.get(variable):
        return Path(os.path.abspath(os.path.expanduser(folder)))  # noqa: PTH100, PTH111 - there may be no home
    data = environment.get("XDG_DATA_HOME", "")
    if not Path(data).is_absolute():
        data = os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(data) / "kestrl" / name


@contextmanager
def locked(folder: Path, name: str, waiting: Callable[[], None] | None = None) -> Generator[int]:
    """Holds the exclusive lock of an environment's name.

    Args:
        folder: Folder of environments.
        name: The environment's.
        waiting: Called before it waits for another holder; None to not wait.

    Raises:
        BlockingIOError: Another process holds it, and `waiting` is None.
    """
    (folder / LOCKS).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def in_use(python: Path | None) -> Generator[None]:
    """Holds the shared lock of the environment that an interpreter belongs to, so that it is not removed; nothing for
    interpreters that are not ours.
    """
    handle = None if python is None else _open_lock(python)
    try:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _open_lock(python: Path) -> int | None:
    path = python.parents[1]
    try:
        return os.open(path.parent / LOCKS / path.name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not installed by us
        return None


def remove_unfinished(folder: Path, name: str) -> None:
    """Removes what earlier attempts at a name have left; the caller holds its lock."""
    for unfinished in folder.glob(f".making-{name}-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def users(path: Path) -> Iterator[int]:
    """Processes of this user that run in an environment."""
    places = {f"{path}/", f"{path.resolve()}/"}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            text = (process / "cmdline").read_bytes().partition(b"\0")[0] + b"\n" + (process / "maps").read_bytes()
        except OSError:  # ended, or of another user
            continue
        if any(place.encode() in text for place in places):
            yield int(process.name)
