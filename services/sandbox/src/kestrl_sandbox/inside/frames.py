"""Messages between the service and a sandbox's supervisor: a JSON header and bytes, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

PREFIX = struct.Struct("!II")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 28


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return PREFIX.pack(len(text), len(body)) + text + body


def lengths(prefix: bytes) -> tuple[int, int]:
    """Lengths of header and body.

    Raises:
        ValueError: Beyond what either side sends.
    """
    header, body = PREFIX.unpack(prefix)
    if header > MAX_HEADER or body > MAX_BODY:
        raise ValueError(f"a message of {header} and {body} bytes")
    return header, body


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Reads one message from a blocking socket; None at its end."""
    prefix = _exactly(connection, PREFIX.size)
    if prefix is None:
        return None
    header, body = lengths(prefix)
    text, content = _exactly(connection, header), _exactly(connection, body)
    return None if text is None or content is None else (json.loads(text), content)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
