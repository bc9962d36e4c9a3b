"""The job that this process is working on, in a file that outlives the process: the next start knows what killed the
last one.

The file is in a volume of the pod, so a restarted container finds it, and it is deleted with the pod. It names a job
only while code runs on that job, never while something is awaited: at most one job at a time, and none after a regular
end of the operator. It is written without fsync, because only the process may die, not the machine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kestrl.errors import UserInputError

log = logging.getLogger(__name__)
LARGEST_RECORD = 4096


class Handled(NamedTuple):
    """A spec of a job, as it was being processed."""

    namespace: str
    name: str
    uid: str
    generation: int


class WorkRecord:
    """The record of this process, and what the previous process left in it."""

    def __init__(self, path: Path | None) -> None:
        """Reads the record and clears it.

        Args:
            path: The file; None keeps no record.

        Raises:
            UserInputError: It cannot be written.
        """
        self.killed_by: Handled | None = None
        """What the previous process was working on when it was killed."""
        self._file: int | None = None
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            record = os.pread(self._file, LARGEST_RECORD, 0)
            os.ftruncate(self._file, 0)
        except OSError as error:
            raise UserInputError(f"workFile: {path}: {error.strerror}; name a file in a volume of the pod") from error
        self.killed_by = _read(record)
        if self.killed_by is not None:
            log.error(
                "the previous process was killed while it worked on %s/%s",
                self.killed_by.namespace,
                self.killed_by.name,
            )

    @contextmanager
    def on(self, job: Mapping[str, Any]) -> Generator[None]:
        """Records a job while code runs on it; nothing may be awaited within."""
        if self._file is None:
            yield
            return
        metadata = job["metadata"]
        handled = Handled(metadata["namespace"], metadata["name"], metadata["uid"], metadata.get("generation", 0))
        os.pwrite(self._file, json.dumps(handled).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _read(record: bytes) -> Handled | None:
    """The parsed record; None for an empty or truncated one."""
    try:
        namespace, name, uid, generation = json.loads(record)
    except (ValueError, TypeError):
        return None
    return Handled(str(namespace), str(name), str(uid), int(generation))
