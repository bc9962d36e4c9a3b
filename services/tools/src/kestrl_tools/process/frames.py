"""Messages between the tool service and its processes: JSON with a length before it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("<I")
MAX_FRAME = 64 * 1024 * 1024
"""Maximum bytes of a message; a process that sends a longer one is treated as ended."""
Message = dict[str, Any]


def _body(header: bytes) -> int:
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ConnectionError(f"a message of {length} bytes; at most {MAX_FRAME} are read")
    return int(length)


def encoded(message: Message) -> bytes:
    body = json.dumps(message, ensure_ascii=True).encode()
    return HEADER.pack(len(body)) + body


def ask(connection: socket.socket, message: Message, seconds: float) -> Message:
    """Sends a message and waits for the answer.

    Raises:
        OSError: The connection is closed, or there is no answer in time (TimeoutError).
    """
    connection.settimeout(seconds)
    connection.sendall(encoded(message))
    return receive(connection)


def receive(connection: socket.socket) -> Message:
    """The next message; raises ConnectionError if the connection is closed."""
    found: Message = json.loads(_exactly(connection, _body(_exactly(connection, HEADER.size))))
    return found


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the connection is closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: The connection is closed.
        ConnectionError: The connection is broken, or the message is too long.
    """
    length = _body(await reader.readexactly(HEADER.size))
    found: Message = json.loads(await reader.readexactly(length))
    return found


async def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Sends a message; raises ConnectionError if the connection is closed."""
    writer.write(encoded(message))
    await writer.drain()
