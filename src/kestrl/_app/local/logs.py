"""Logs of a run's components: bounded in size, and readable across rotations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 8 * 1024 * 1024
"""Maximum size of a component's log in bytes: the newer half is NAME.log, the older half NAME.log.1."""
PIECE_BYTES = 64 * 1024


def older(path: Path) -> Path:
    """Path of the older half of a log."""
    return path.with_name(f"{path.name}.1")


class Log:
    """The log of one component, rotated when it reaches half of its maximum size."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self._path, self._half = path, limit // 2
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Appends data. A line is split between two files only if it is longer than half of the maximum size.

        On a full disk the data is dropped, so that the component continues.
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
                byte_count = self._file.write(data)
                self._size += byte_count
                data = data[byte_count:]
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
        """Closes the file."""
        self._file.close()

    async def copy(self, source: asyncio.StreamReader) -> None:
        """Appends the output of a program until it ends."""
        try:
            while data := await source.read(PIECE_BYTES):
                self.write(data)
        finally:
            self.close()


def tail(path: Path, size: int) -> bytes:
    """Last bytes of a log, across both halves; empty if there is no log."""
    tail_bytes = b""
    for part in (path, older(path)):
        try:
            with part.open("rb") as file:
                file.seek(max(0, part.stat().st_size - (size - len(tail_bytes))))
                tail_bytes = file.read() + tail_bytes
        except FileNotFoundError:
            continue
        if len(tail_bytes) >= size:
            break
    return tail_bytes[-size:]


class LogFollower:
    """Reads complete lines of a log as they are written, across rotations.

    Args:
        path: The log.
        at_end: Whether to skip the existing content.
    """

    def __init__(self, path: Path, *, at_end: bool) -> None:
        self._path, self._rest = path, b""
        self._file: BinaryIO | None = None
        if at_end:
            self._open()
            if self._file is not None:
                self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _rotated(self, file: BinaryIO) -> bool:
        try:
            path_stat = self._path.stat()
        except FileNotFoundError:  # the file is being rotated
            return False
        file_stat = os.fstat(file.fileno())
        return (path_stat.st_dev, path_stat.st_ino) != (file_stat.st_dev, file_stat.st_ino)

    def lines(self) -> Iterator[str]:
        """Lines written since the last call, without an incomplete last line."""
        if self._file is None:
            self._open()
        while self._file is not None:
            # Checked before the last read, so that everything written before the rotation is read.
            rotated = self._rotated(self._file)
            yield from self._whole(self._file.read())
            if not rotated:
                return
            self._file.close()
            self._open()

    def _whole(self, data: bytes) -> Iterator[str]:
        *complete_lines, self._rest = (self._rest + data).split(b"\n")
        for line in complete_lines:
            yield line.decode(errors="replace")
