"""Installed engines: a folder with an environment for each engine, version and device.

```
ENGINES/vllm-0.32.0-cpu/    bin/python, lib, ...    lock.txt    engine.json    verified, after `engine check`
ENGINES/.locks/NAME         locked (flock): exclusively by what makes or removes it, shared by a run that uses it
ENGINES/.making-NAME-*      an unfinished one, which the next installation of the name removes
```
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kestrl._shared.spec.inference import is_version
from kestrl.errors import UserInputError

VARIABLE = "KESTRL_ENGINES"
"""Environment variable with the folder of installed engines."""
RECORD, VERIFIED, LOCK = "engine.json", "verified", "lock.txt"
LOCKS = ".locks"


class Record(BaseModel):
    """What `engine.json` says."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    engine: str
    version: str
    device: str
    locked: bool
    """Whether a lock that ships with KestRL was installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An installed engine."""

    path: Path
    record: Record

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def verified(self) -> bool:
        """Whether its lock was tested, or the conformance suite passed here."""
        return self.record.locked or (self.path / VERIFIED).exists()

    def __str__(self) -> str:
        return f"{self.record.engine}=={self.record.version}" + (
            "" if self.record.device == "cpu" else f" --device {self.record.device}"
        )


def engines_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of installed engines: that of the variable, or one in the user's data folder."""
    if named := environment.get(VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(named)))  # noqa: PTH100, PTH111 - there may be no home
    data = environment.get("XDG_DATA_HOME", "")
    if not Path(data).is_absolute():
        data = os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(data) / "kestrl" / "engines"


def name_of(engine: str, version: str, device: str) -> str:
    """Name of the folder of an engine."""
    return f"{engine}-{version}-{device}"


def installed_engines(folder: Path) -> list[Installed]:
    """The installed engines by name.

    Raises:
        UserInputError: A record is damaged.
    """
    paths = sorted(path.parent for path in folder.glob(f"*/{RECORD}") if not path.parent.name.startswith("."))
    return [read_installed(path) for path in paths]


def read_installed(path: Path) -> Installed:
    """The engine in a folder.

    Raises:
        UserInputError: Its record is damaged.
    """
    try:
        return Installed(path=path, record=Record.model_validate_json((path / RECORD).read_bytes()))
    except ValidationError as error:
        raise UserInputError(f"{path / RECORD} is damaged; remove {path} and install the engine again") from error


def fitting(folder: Path, engine: str, version: str | None, device: str) -> Installed | None:
    """The installed engine that serves: verified ones first, then the newest."""
    serving = [
        each
        for each in installed_engines(folder)
        if (each.record.engine, each.record.device) == (engine, device)
        and (version is None or is_version(each.record.version, version))
    ]
    return max(serving, key=lambda each: (each.verified, _numbers(each.record.version)), default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


@contextmanager
def locked(folder: Path, name: str, waiting: Callable[[], None] | None = None) -> Generator[int]:
    """Holds the exclusive lock of an engine's name.

    Args:
        folder: Folder of installed engines.
        name: The engine's.
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
    """Holds the shared lock of the installed engine that an interpreter belongs to, so that it is not removed; nothing
    for other interpreters.
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
