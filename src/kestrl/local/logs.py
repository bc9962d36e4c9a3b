"""Logs of a run's components: bounded while they are written, and read across their rotations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 8 * 1024 * 1024
"""Of a component's log: half of it in NAME.log, and the half before in NAME.log.1."""
PIECE_BYTES = 64 * 1024


def older(path: Path) -> Path:
    """Where the log's older half lies."""
    return path.with_name(f"{path.name}.1")


class Log:
    """The log of one component, appended to and rotated when it has reached half of its bound."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self._path, self._half = path, limit // 2
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Appends; a line is split between two files only if it is longer than half of the bound.

        What a full disk does not take is left out: the component goes on.
        """
        if self._size + len(data) > self._half:
            cut = data.rfind(b"\n", 0, max(0, self._half - self._size)) + 1
            self._append(data[:cut])
            self._rotate()
            data = data[cut:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        try:
            while data:
                written = self._file.write(data)
                self._size += written
                data = data[written:]
        except OSError:
            return

    def _rotate(self) -> None:
        if not self._size:
            return
        try:
            self._path.replace(older(self._path))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        except OSError:
            return

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()

    async def copy(self, source: asyncio.StreamReader) -> None:
        """Appends what a program writes, to its end."""
        try:
            while data := await source.read(PIECE_BYTES):
                self.write(data)
        finally:
            self.close()


def tail(path: Path, size: int) -> bytes:
    """The last bytes of a log, from its older half too; empty where there is none."""
    found = b""
    for part in (path, older(path)):
        try:
            with part.open("rb") as file:
                file.seek(max(0, part.stat().st_size - (size - len(found))))
                found = file.read() + found
        except FileNotFoundError:
            continue
        if len(found) >= size:
            break
    return found[-size:]


class Follower:
    """Whole lines of a log as they are written, over rotations.

    Args:
        path: The log.
        at_end: Whether what is there already is skipped.
    """

    def __init__(self, path: Path, *, at_end: bool) -> None:
        self._path, self._rest = path, b""
        self._file: BinaryIO | None = None
        if at_end:
            self._open()
            if self._file is not None:
                self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _rotated(self, file: BinaryIO) -> bool:
        try:
            named = self._path.stat()
        except FileNotFoundError:  # between two names
            return False
        held = os.fstat(file.fileno())
        return (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino)

    def lines(self) -> Iterator[str]:
        """What was written since the last call; a line that has no end yet comes with the next."""
        if self._file is None:
            self._open()
        while self._file is not None:
            # Asked before the last read: what was written to a file until it was rotated is then surely read.
            rotated = self._rotated(self._file)
            yield from self._whole(self._file.read())
            if not rotated:
                return
            self._file.close()
            self._open()

    def _whole(self, data: bytes) -> Iterator[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
