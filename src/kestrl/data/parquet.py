"""Rows of Parquet files, which a process of its own reads within bounds of memory: a page of a few bytes may hold
gigabytes, and the library that decodes it is not written for hostile files.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from kestrl.errors import UserInputError

READER = "kestrl.data.parquet_reader"
MEMORY_BYTES = 2 * 1024**3
"""Memory of the reader."""
MAX_ROW = 64 * 1024**2
"""Maximum memory of a row."""
FRAME = struct.Struct(">BI")
"""Header of a message of the reader: its kind, and the bytes that follow."""
ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
"""Keeps the reader's memory to what it decodes: pools and arenas reserve more."""


class MessageKind(IntEnum):
    """Kinds of messages."""

    DIED = 0
    """None: the process ended without a last one."""
    ROW = 1
    END = 2
    REFUSED = 3
    """Why the file is refused, to be written behind its path."""


class ParquetRow(NamedTuple):
    """A row of a file."""

    number: int
    """From 1."""
    total: int
    """Rows of the file, as it states."""
    columns: dict[str, Any]


def parquet_rows(path: Path) -> Iterator[ParquetRow]:
    """The rows of a file.

    Raises:
        UserInputError: It is not readable, or larger than its bounds when it is decoded.
    """
    if find_spec("pyarrow") is None:
        raise UserInputError(f"{path}: reading Parquet needs pyarrow: pip install 'kestrl[parquet]'")
    process = subprocess.Popen(  # noqa: S603 - a fixed command
        [sys.executable, "-P", "-m", READER, os.fspath(path.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    assert process.stdout is not None
    try:
        while True:
            kind, content = _frame(process.stdout)
            if kind is MessageKind.ROW:
                yield ParquetRow(*pickle.loads(content))  # noqa: S301 - written by this package's own reader
            elif kind is MessageKind.END:
                return
            elif kind is MessageKind.REFUSED:
                raise UserInputError(f"{path}{content.decode()}")
            else:
                raise UserInputError(
                    f"{path}: not readable as Parquet: its reader ended with status {process.wait()}, in which it may "
                    f"use {MEMORY_BYTES >> 20} MiB of memory"
                )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _frame(stream: IO[bytes]) -> tuple[MessageKind, bytes]:
    """The next message of the reader; `Kind.DIED` where it ended without one."""
    header = stream.read(FRAME.size)
    if len(header) < FRAME.size:
        return MessageKind.DIED, b""
    kind, size = FRAME.unpack(header)
    content = stream.read(min(size, 2 * MAX_ROW))
    return (MessageKind(kind), content) if len(content) == size else (MessageKind.DIED, b"")
