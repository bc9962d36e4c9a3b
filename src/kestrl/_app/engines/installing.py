"""Makes and removes environments of engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kestrl._app.engines.builds import LOCKED, Wanted, lock_text, locked_version
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
from kestrl._app.interpreters.making import REQUIREMENTS, make_environment
from kestrl._app.interpreters.places import locked, remove_unfinished, users
from kestrl._shared.spec.inference import is_version
from kestrl.errors import UserInputError

Say = Callable[[str], None]
"""Shows a line of progress."""
BYTES = 8 * 2**30
"""Free space below which an installation is refused: what the largest build needs, with its downloads."""


def install(folder: Path, request: Wanted, say: Say, *, free: int = BYTES) -> Installed:
    """The wanted engine, installed if it is not there, or was installed from another lock than the one that ships now.
    Installs into a temporary folder that gets its name at the end.

    Args:
        folder: Folder of installed engines.
        request: The engine.
        say: Shows progress.
        free: Bytes that must be free.

    Raises:
        UserInputError: It cannot be resolved or installed, or a process uses the one of another lock.
    """
    version = locked_version(request)
    installed = fitting(folder, request.engine, version or request.version, request.device)
    if installed is not None and (version or request.version) and _is_current(installed):
        return installed
    _require_space(folder, free)
    tested = version is not None
    if version is not None:
        lock = lock_text(request.engine, version, request.device)
    else:
        say(f"{request} has no lock that ships with kestrl: resolving it")
        version, lock = resolve(request, sys.executable)
    record = Record(engine=request.engine, version=version, device=request.device, locked=tested)
    name = name_of(request.engine, version, request.device)
    with locked(
        folder, name, lambda: say(f"waiting for another process that installs, removes or uses {name}")
    ) as handle:
        path = folder / name
        if (path / RECORD).exists():
            installed = read_installed(path)
            if _is_current(installed):
                return installed
            say(f"removing {installed}, which was installed from another lock")
            _discard(folder, installed)
        remove_unfinished(folder, name)
        say(f"installing {request.engine} {version} for {request.device} in {path}")
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


def _is_current(engine: Installed) -> bool:
    """Whether an engine was installed from the lock that ships for it now, if there is one."""
    record = engine.record
    if not record.locked or record.version not in LOCKED.get((record.engine, record.device), ()):
        return True
    lock = engine.path / REQUIREMENTS
    return lock.is_file() and lock.read_text(encoding="utf-8") == lock_text(
        record.engine, record.version, record.device
    )


def _require_space(folder: Path, need: int) -> None:
    if not folder.is_absolute():
        raise UserInputError(f"--engines: {folder} is relative, as there is no home folder; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserInputError(
            f"--engines: {folder} has {free / 2**30:.1f} GiB free, and an engine needs up to {need / 2**30:.0f} GiB; "
            "free some, or name another folder"
        )


def find_installed(folder: Path, request: Wanted) -> Installed:
    """The one installed engine that is named.

    Raises:
        UserInputError: There is none, or several.
    """
    build = (request.engine, request.device)
    matches = [
        engine
        for engine in installed_engines(folder)
        if (engine.record.engine, engine.record.device) == build
        and (request.version is None or is_version(engine.record.version, request.version))
    ]
    if not matches:
        listing = ", ".join(map(str, installed_engines(folder))) or "none"
        raise UserInputError(f"ENGINE: {request} is not installed in {folder} (there are: {listing})")
    if len(matches) > 1:
        raise UserInputError(f"ENGINE: several are installed, name one: {', '.join(map(str, matches))}")
    return matches[0]


def remove(folder: Path, engine: Installed) -> None:
    """Removes an engine that nothing uses.

    Raises:
        UserInputError: A process uses it.
    """
    try:
        with locked(folder, engine.path.name):
            _discard(folder, engine)
    except BlockingIOError as error:
        raise UserInputError(f"ENGINE: {engine} is being installed, or a run uses it; stop it first") from error


def _discard(folder: Path, engine: Installed) -> None:
    """Removes an engine that no process uses; the caller holds the lock of its name."""
    using = sorted(users(engine.path))
    if using:
        pids = ", ".join(map(str, using))
        raise UserInputError(f"ENGINE: {engine} is used by process {pids}; stop it first")
    removed = folder / f".making-{engine.path.name}-removed-{os.getpid()}"
    engine.path.rename(removed)
    shutil.rmtree(removed)


def size(path: Path) -> int:
    """Bytes of an environment on disk; files that uv links from its cache count, too."""
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
