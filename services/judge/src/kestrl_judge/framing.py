"""Framing between the judge and its reward processes: length-prefixed protobuf messages.

A request is a `ScoreGroupRequest` with one episode, its answer an `EpisodeScore`. The judge's first message is the
configuration of the reward as JSON, the first one of the process an `EpisodeScore`, without a failure if the reward is
loaded.
"""

from __future__ import annotations

import asyncio
import struct
from io import BufferedRWPair

HEADER = struct.Struct("<I")


def read_frame(stream: BufferedRWPair) -> bytes | None:
    """Reads the next message; None if the connection is closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BufferedRWPair, body: bytes) -> None:
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


async def receive(reader: asyncio.StreamReader) -> bytes:
    """Reads the next message; raises asyncio.IncompleteReadError if the connection is closed."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


async def send(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Sends a message; raises ConnectionError if the connection is closed."""
    writer.write(HEADER.pack(len(body)) + body)
    await writer.drain()
