"""What the process of a session reports of a cell: one packet, which nothing but its form is trusted of.

The code that was handed over shares its process with the sender, so that it may write any packet. One without the
number of the cell, or of another process, is ignored.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

NUMBER_BYTES = 16
LONGEST_TEXT = 1 << 16
"""Bytes of a value or a traceback that are reported beside the output."""
LONGEST_SUMMARY = 1 << 14
"""Bytes of an exception's own text."""
LONGEST_NAME = 256
"""Bytes of the name of an exception's type."""
_HEAD = struct.Struct(f"!{NUMBER_BYTES}sB?B3I")
_NOTHING, _DISPLAY, _ERROR = 0, 1, 2
MAX_PACKET = _HEAD.size + LONGEST_NAME + LONGEST_SUMMARY + LONGEST_TEXT
_CREDENTIALS = struct.Struct("iii")


@dataclass(slots=True)
class Ended:
    """How code in a process ended."""

    status: int = 0
    """Exit status, as the interpreter would have it."""
    memory: bool = False
    """Whether memory ran out."""
    display: str | None = None
    error: dict[str, str] | None = None


def shortened(text: str, limit: int) -> bytes:
    """The beginning of a text as UTF-8, in at most `limit` bytes."""
    beginning = str.__getitem__(text, slice(limit))  # not the method of a class that the code has derived from str
    return beginning.encode("utf-8", "backslashreplace")[:limit].decode("utf-8", "ignore").encode()


def encode(ending: Ended, number: bytes) -> bytes:
    """The packet for the end of a cell."""
    kind, texts = _NOTHING, [b"", b"", b""]
    if ending.error is not None:
        kind = _ERROR
        texts = [
            shortened(ending.error["type"], LONGEST_NAME),
            shortened(ending.error["text"], LONGEST_SUMMARY),
            shortened(ending.error["traceback"], LONGEST_TEXT),
        ]
    elif ending.display is not None:
        kind, texts[2] = _DISPLAY, shortened(ending.display, LONGEST_TEXT)
    head = _HEAD.pack(number, ending.status & 0xFF, ending.memory, kind, *map(len, texts))
    return head + b"".join(texts)


def decode(packet: bytes, number: bytes) -> Ended | None:
    """The end of the cell with this number; None for a packet that is anything else."""
    if len(packet) < _HEAD.size:
        return None
    packet_number, status, memory, kind, *lengths = _HEAD.unpack_from(packet)
    if packet_number != number or kind > _ERROR or sum(lengths) != len(packet) - _HEAD.size:
        return None
    texts: list[str] = []
    offset = _HEAD.size
    for length, limit in zip(lengths, (LONGEST_NAME, LONGEST_SUMMARY, LONGEST_TEXT), strict=True):
        if length > limit:
            return None
        texts.append(packet[offset : offset + length].decode("utf-8", "replace"))
        offset += length
    if kind == _ERROR:
        return Ended(status, memory, error=dict(zip(("type", "text", "traceback"), texts, strict=True)))
    return Ended(status, memory, display=texts[2] if kind == _DISPLAY else None)


def packet_sockets() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end, which never blocks and learns the sender of each packet from the kernel, and the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    with suppress(OSError):  # what the kernel gives by itself holds a report, too, but where it was made smaller
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET)
    return ours, theirs


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """Takes a packet and the number of the process that sent it; an empty packet is the end.

    Raises:
        BlockingIOError: There is none.
    """
    # The space holds credentials and no descriptor: what somebody passes is closed by the kernel.
    space = socket.CMSG_SPACE(_CREDENTIALS.size)
    packet, ancillary, flags, _address = connection.recvmsg(MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
    pid = next((_CREDENTIALS.unpack(data)[0] for _l, kind, data in ancillary if kind == socket.SCM_CREDENTIALS), 0)
    return (b"\0" if flags & socket.MSG_TRUNC else packet), pid


def send(connection: socket.socket, ending: Ended, number: bytes) -> None:
    """Sends a report, without its texts where the kernel has no room for them.

    Raises:
        OSError: The connection is closed.
    """
    try:
        connection.sendall(encode(ending, number))
    except OSError:
        connection.sendall(encode(Ended(ending.status, ending.memory), number))


def new_number() -> bytes:
    """The number of a cell, which nobody knows before it."""
    return os.urandom(NUMBER_BYTES)
