"""Messages between the tool service and its processes: JSON in frames of bounded length."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from kestrl._shared.processes import frames

Message = dict[str, Any]


def encoded(message: Message) -> bytes:
    """A message as a frame."""
    return frames.framed(json.dumps(message, ensure_ascii=True).encode())


def _decoded(body: bytes) -> Message:
    message: Message = json.loads(body)
    return message


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
    return _decoded(frames.receive(connection))


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: The connection is closed.
        ConnectionError: The connection is broken, or the message is too long.
    """
    return _decoded(await frames.read(reader))


async def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Sends a message; raises ConnectionError if the connection is closed."""
    writer.write(encoded(message))
    await writer.drain()
