"""Cursors: which objects of a run a target has received. Without one everything is sent again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kestrl._app.interpreters.places import data_folder, locked
from kestrl._app.local.files import write_atomic
from kestrl.errors import UserInputError, place_error

VARIABLE = "KESTRL_PUSHED"
"""Environment variable with the folder of cursors."""
VERSION = 1
SAVE_SECONDS = 1.0
"""Least time between two writes: what a kill forgets is sent again."""


class Cursor:
    """What one target has received of one run.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._receiver, self._sent = _read(path)
        self._dirty, self._saved = False, 0.0

    def begin(self, receiver: str) -> None:
        """Names what receives the run; another one than before has received nothing."""
        if receiver != self._receiver:
            self._receiver, self._sent, self._dirty = receiver, {}, True

    def has(self, path: str, tag: str) -> bool:
        """Whether this version of an object was sent."""
        return self._sent.get(path) == tag

    def sent(self, path: str, tag: str) -> None:
        """Records that an object was sent."""
        self._sent[path], self._dirty = tag, True
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Writes what is not written yet.

        Raises:
            PlaceError: The folder cannot be written.
        """
        if not self._dirty:
            return
        content = {"version": VERSION, "receiver": self._receiver, "sent": self._sent}
        try:
            write_atomic(self._path, json.dumps(content))
        except OSError as error:
            raise place_error(error, f"{VARIABLE}: {self._path}") or error from error
        self._dirty, self._saved = False, time.monotonic()


def _read(path: Path) -> tuple[str, dict[str, str]]:
    """Receiver and versions of a cursor; none of one that is missing or damaged, since sending again is harmless."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return "", {}
    if not isinstance(content, dict):
        return "", {}
    fields = cast("dict[str, Any]", content)
    if fields.get("version") != VERSION or not isinstance(fields.get("sent"), dict):
        return "", {}
    return str(fields.get("receiver", "")), {str(name): str(tag) for name, tag in fields["sent"].items()}


@contextmanager
def open_cursor(storage: str, target: str) -> Generator[Cursor]:
    """The cursor of a run and a target, held by one process at a time.

    Args:
        storage: Address of the run's storage.
        target: Key of the target.

    Raises:
        UserInputError: Another process sends the same run to the same target, or the folder cannot be used.
    """
    folder = data_folder("pushed", VARIABLE)
    name = hashlib.sha256(f"{storage}\n{target}".encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, name):
            cursor = Cursor(folder / f"{name}.json")
            try:
                yield cursor
            finally:
                cursor.save()
    except BlockingIOError as error:
        raise UserInputError(f"another `kestrl push` sends {storage} to {target}; wait for it, or end it") from error
    except OSError as error:
        raise place_error(error, f"{VARIABLE}: {folder}") or error from error
