"""Frames between a component and a process with user code: a length of four bytes, and a body of bounded length.

The other side is not trusted: a body longer than the bound is never read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from io import BufferedIOBase
from typing import IO

HEADER = struct.Struct("<I")
MAX_FRAME = 64 * 1024 * 1024
"""Largest number of bytes of a body that is read, unless a caller says another."""
PART = 1 << 20


class FrameTooLong(ConnectionError):
    """A body above the bound was announced; the connection cannot be used any more."""


def framed(body: bytes) -> bytes:
    """A frame.

    Raises:
        FrameTooLong: The body is longer than a header can say.
    """
    return _header(len(body)) + body


def _header(length: int) -> bytes:
    if length >= 1 << 32:
        raise FrameTooLong(f"a message of {length} bytes; a frame holds fewer than {1 << 32}")
    return HEADER.pack(length)


def _length(header: bytes, limit: int) -> int:
    (length,) = HEADER.unpack(header)
    if length > limit:
        raise FrameTooLong(f"a message of {length} bytes; at most {limit} are read")
    return int(length)


async def read(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes:
    """The next body.

    Raises:
        asyncio.IncompleteReadError: The connection is closed.
        ConnectionError: The connection is broken, or the body is too long (`FrameTooLong`).
    """
    return await reader.readexactly(_length(await reader.readexactly(HEADER.size), limit))


async def write(writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
    """Sends a frame whose body is given in parts, which are copied once; raises ConnectionError if the connection is
    closed.
    """
    writer.writelines((_header(sum(map(len, parts))), *parts))
    await writer.drain()


def receive(connection: socket.socket, limit: int = MAX_FRAME) -> bytes:
    """The next body.

    Raises:
        TimeoutError: It did not come within the time limit of the socket.
        ConnectionError: The connection is closed or broken, or the body is too long (`FrameTooLong`).
    """
    return _exactly(connection, _length(_exactly(connection, HEADER.size), limit))


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = connection.recv(min(length, PART))
        if not part:
            raise ConnectionError("the connection is closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def read_file(stream: BufferedIOBase | IO[bytes], limit: int = MAX_FRAME) -> bytes | None:
    """The next body of a blocking file; None if the other side has closed it, amid a frame or between two.

    Raises:
        FrameTooLong: The body is too long.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = _length(header, limit)
    body = stream.read(length)
    return body if len(body) == length else None


def write_file(stream: BufferedIOBase | IO[bytes], body: bytes) -> None:
    """Sends a frame by a blocking file."""
    stream.write(framed(body))
    stream.flush()
