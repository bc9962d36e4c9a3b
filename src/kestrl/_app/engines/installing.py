"""Makes and removes environments of engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kestrl._app.engines.builds import Wanted, lock_text, locked_version
from kestrl._app.engines.resolving import resolve
from kestrl._app.engines.store import (
    RECORD,
    Installed,
    Record,
    fitting,
    installed_engines,
    name_of,
    read_installed,
)
from kestrl._app.interpreters.making import make_environment
from kestrl._app.interpreters.places import locked, remove_unfinished, users
from kestrl._shared.spec.inference import is_version
from kestrl.errors import UserInputError

Say = Callable[[str], None]
"""Shows a line of progress."""
BYTES = 8 * 2**30
"""Free space below which an installation is refused: what the largest build needs, with its downloads."""


def install(folder: Path, wanted: Wanted, say: Say, *, free: int = BYTES) -> Installed:
    """The wanted engine, installed if it is not there. Installs into a temporary folder that gets its name at the end.

    Args:
        folder: Folder of installed engines.
        wanted: The engine.
        say: Shows progress.
        free: Bytes that must be free.

    Raises:
        UserInputError: It cannot be resolved or installed.
    """
    version = locked_version(wanted)
    there = fitting(folder, wanted.engine, version or wanted.version, wanted.device)
    if there is not None and (version or wanted.version):
        return there
    _require_space(folder, free)
    tested = version is not None
    if version is not None:
        lock = lock_text(wanted.engine, version, wanted.device)
    else:
        say(f"{wanted} has no lock that ships with kestrl: resolving it")
        version, lock = resolve(wanted, sys.executable)
    record = Record(engine=wanted.engine, version=version, device=wanted.device, locked=tested)
    name = name_of(wanted.engine, version, wanted.device)
    with locked(folder, name, lambda: say(f"waiting for another process that installs or removes {name}")) as handle:
        path = folder / name
        if (path / RECORD).exists():
            return read_installed(path)
        remove_unfinished(folder, name)
        say(f"installing {wanted.engine} {version} for {wanted.device} in {path}")
        make_environment(
            path,
            python=sys.executable,
            requirements=lock,
            exact=True,
            record=(RECORD, record.model_dump_json()),
            purpose=f"{record.engine}=={record.version} cannot be installed",
            handle=handle,
        )
        return read_installed(path)


def _require_space(folder: Path, least: int) -> None:
    if not folder.is_absolute():
        raise UserInputError(f"--engines: {folder} is relative, as there is no home folder; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < least:
        raise UserInputError(
            f"--engines: {folder} has {free / 2**30:.1f} GiB free, and an engine needs up to {least / 2**30:.0f} GiB; "
            "free some, or name another folder"
        )


def find_installed(folder: Path, wanted: Wanted) -> Installed:
    """The one installed engine that is named.

    Raises:
        UserInputError: There is none, or several.
    """
    build = (wanted.engine, wanted.device)
    named = [
        each
        for each in installed_engines(folder)
        if (each.record.engine, each.record.device) == build
        and (wanted.version is None or is_version(each.record.version, wanted.version))
    ]
    if not named:
        there = ", ".join(map(str, installed_engines(folder))) or "none"
        raise UserInputError(f"ENGINE: {wanted} is not installed in {folder} (there are: {there})")
    if len(named) > 1:
        raise UserInputError(f"ENGINE: several are installed, name one: {', '.join(map(str, named))}")
    return named[0]


def remove(folder: Path, engine: Installed) -> None:
    """Removes an engine that nothing uses.

    Raises:
        UserInputError: A process uses it.
    """
    try:
        with locked(folder, engine.path.name):
            using = sorted(users(engine.path))
            if using:
                pids = ", ".join(map(str, using))
                raise UserInputError(f"ENGINE: {engine} is used by process {pids}; stop it first")
            gone = folder / f".making-{engine.path.name}-removed-{os.getpid()}"
            engine.path.rename(gone)
            shutil.rmtree(gone)
    except BlockingIOError as error:
        raise UserInputError(f"ENGINE: {engine} is being installed, or a run uses it; stop it first") from error


def size(path: Path) -> int:
    """Bytes of an environment on disk; files that uv links from its cache count, too."""
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
