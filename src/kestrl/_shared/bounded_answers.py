"""A bound on the bytes of an answer over HTTP, also after decompression: MCP servers and models send what they like."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum bytes of a message of the server; a longer one ends the call or the connection."""
PIECE = 65_536
"""Bytes that are decompressed at once."""
WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window sizes of zlib for the encodings that are read; the request asks for none."""


class AnswerTooLong(httpx2.StreamError):
    """The answer is above its bound, or encoded in a way that cannot be bounded."""


class BoundedStream(httpx2.AsyncByteStream):
    """The decoded body of a response."""

    def __init__(self, stream: httpx2.AsyncByteStream, encoding: str, limit: int | None) -> None:
        """Describes it.

        Args:
            stream: The body as it is sent.
            encoding: Its encoding, in lower case.
            limit: Maximum bytes, encoded and decoded; None for a stream of events, which are bounded one by one.
        """
        self._stream, self._encoding, self._limit = stream, encoding, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = decoded = 0
        window = WINDOWS.get(self._encoding)
        if window is None and self._encoding not in ("", "identity"):
            raise AnswerTooLong(f"its encoding {self._encoding[:40]!r} was not asked for")
        inflating = None if window is None else zlib.decompressobj(window)
        async for sent in self._stream:
            received += len(sent)
            for piece in _inflated(inflating, sent) if inflating is not None else (sent,):
                decoded += len(piece)
                if self._limit is not None and max(received, decoded) > self._limit:
                    raise AnswerTooLong(f"it is longer than {self._limit} bytes")
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _inflated(inflating: Any, sent: bytes) -> Iterator[bytes]:
    """The decompressed bytes, made a piece at a time.

    Raises:
        AnswerTooLong: They are not compressed as the response says.
    """
    rest = sent
    while rest:
        try:
            piece: bytes = inflating.decompress(rest, PIECE)
        except zlib.error as error:
            raise AnswerTooLong(f"it is not compressed as it says: {error}") from error
        yield piece
        rest = inflating.unconsumed_tail


async def bound(response: httpx2.Response) -> None:
    """Bounds a response before its body is read: a hook of the client."""
    encoding = response.headers.pop("Content-Encoding", "").strip().lower()
    events = response.headers.get("Content-Type", "").strip().lower().startswith("text/event-stream")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = BoundedStream(response.stream, encoding, None if events else MAX_MESSAGE)
