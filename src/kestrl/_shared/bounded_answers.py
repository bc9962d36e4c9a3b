"""A bound on the bytes of an answer over HTTP, also after decompression, and on its values: MCP servers and models send
what they like.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

from kestrl.data.values import MAX_VALUES, exceeds_values

MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum bytes of a message of the server; a longer one ends the call or the connection."""
PIECE = 65_536
"""Bytes that are decompressed at once."""
WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window sizes of zlib for the encodings that are read; the request asks for none."""


class AnswerTooLong(httpx2.StreamError):
    """The answer is above its bound, or encoded in a way that cannot be bounded."""


BLANK = re.compile(rb"(?:\r\n|\r(?!\n)|\n){2}")
"""What ends an event in a stream of them."""


class BoundedStream(httpx2.AsyncByteStream):
    """The decoded body of a response, passed on once it is complete; of a stream of events, once each of them is."""

    def __init__(self, stream: httpx2.AsyncByteStream, encoding: str, *, events: bool) -> None:
        """Describes it.

        Args:
            stream: The body as it is sent.
            encoding: Its encoding, in lower case.
            events: Whether it is a stream of events, which are bounded one by one.
        """
        self._stream, self._encoding, self._events = stream, encoding, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received, buffer = 0, bytearray()
        window = WINDOWS.get(self._encoding)
        if window is None and self._encoding not in ("", "identity"):
            raise AnswerTooLong(f"its encoding {self._encoding[:40]!r} was not asked for")
        inflating = None if window is None else zlib.decompressobj(window)
        async for chunk in self._stream:
            received += len(chunk)
            for piece in _inflated(inflating, chunk) if inflating is not None else (chunk,):
                complete = _complete(buffer, piece) if self._events else 0
                buffer += piece
                if complete:
                    received = 0
                    yield _checked(buffer[:complete])
                    del buffer[:complete]
                if max(received, len(buffer)) > MAX_MESSAGE:
                    raise AnswerTooLong(f"it is longer than {MAX_MESSAGE} bytes")
        yield _checked(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _complete(buffer: bytearray, piece: bytes) -> int:
    """Bytes of what is held and a piece of it up to the last end of an event."""
    start = max(0, len(buffer) - 3)
    ends = [match.end() for match in BLANK.finditer(buffer[start:] + piece)]
    return start + ends[-1] if ends else 0


def _checked(text: bytes | bytearray) -> bytes:
    """A text.

    Raises:
        AnswerTooLong: It has too many values.
    """
    content = bytes(text)
    if exceeds_values(content):
        raise AnswerTooLong(f"it has more than {MAX_VALUES} values")
    return content


def _inflated(inflating: Any, chunk: bytes) -> Iterator[bytes]:
    """The decompressed bytes, made a piece at a time.

    Raises:
        AnswerTooLong: They are not compressed as the response says.
    """
    compressed = chunk
    while compressed:
        try:
            piece: bytes = inflating.decompress(compressed, PIECE)
        except zlib.error as error:
            raise AnswerTooLong(f"it is not compressed as it says: {error}") from error
        yield piece
        compressed = inflating.unconsumed_tail


async def bound(response: httpx2.Response) -> None:
    """Bounds a response before its body is read: a hook of the client."""
    encoding = response.headers.pop("Content-Encoding", "").strip().lower()
    events = response.headers.get("Content-Type", "").strip().lower().startswith("text/event-stream")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = BoundedStream(response.stream, encoding, events=events)
