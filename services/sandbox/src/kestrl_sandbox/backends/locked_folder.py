"""Temporary folders that do not outlive a killed owner for long: the next owner on the node removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

YOUNG_SECONDS = 60.0
"""Age from which a folder without a lock has lost its owner: a younger one may be locked in a moment."""


class LockedFolder:
    """A temporary folder, locked while its owner lives; the kernel drops the lock of a killed one.

    Args:
        prefix: Of the folder's name. Folders with it in the same place whose owners are gone are removed.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes the folder and gives up its lock; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_abandoned(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or another owner removes it at the same time
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or time.time() - status.st_ctime < YOUNG_SECONDS:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
