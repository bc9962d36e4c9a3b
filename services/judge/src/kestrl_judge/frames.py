"""What goes between the judge and its reward processes: protobuf messages, each behind its length.

Of the judge's own wire: a request is a `ScoreGroupRequest` with one episode, its answer an `EpisodeScore`. The judge's first message
is the reward's configuration as JSON, the process' first an `EpisodeScore`: without a failure it says that the reward is loaded.
"""

from __future__ import annotations

import asyncio
import struct
from io import BufferedRWPair

HEADER = struct.Struct("<I")


def read_frame(stream: BufferedRWPair) -> bytes | None:
    """The next message, or None when the other side is gone."""
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
    """The next message. Raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


async def send(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Sends a message. Raises ConnectionError when the other side is gone."""
    writer.write(HEADER.pack(len(body)) + body)
    await writer.drain()
