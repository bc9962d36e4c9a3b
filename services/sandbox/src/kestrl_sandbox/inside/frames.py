"""Messages between the service and a sandbox's supervisor: a JSON header and bytes, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

PREFIX = struct.Struct("!II")
MAX_HEADER = 1 << 22
"""Bytes of the largest header: twice 256 paths of 1,024 bytes, each of which JSON may write in six."""
MAX_BODY = 1 << 28

LEADER_ENDED = struct.Struct("!Ii")
"""Number of a slot and exit status of its leader, negative for a signal."""
SANDBOX_BROKE, SANDBOX_KILLED = 1, 2
"""Exit status of a leader whose sandbox ended by itself, and of one whose process 1 a signal has ended: no process of
the sandbox can send it one."""


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
