"""Frames of a process that is not trusted: what is sent arrives, and a long one is never read."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Callable, Generator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrl._shared.processes import frames

AT_ANY_LOAD = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Receive = Callable[[bytes, int], bytes | None]


def by_socket(sent: bytes, most: int) -> bytes | None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        return frames.receive(ours, most)


def by_file(sent: bytes, most: int) -> bytes | None:
    return frames.read_file(io.BytesIO(sent), most)


def by_stream(sent: bytes, most: int) -> bytes | None:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await frames.read(reader, most)

    return asyncio.run(read())


WAYS = pytest.mark.parametrize("receive", [by_socket, by_file, by_stream])


@WAYS
def test_a_body_up_to_the_bound_arrives(receive: Receive) -> None:
    for body in (b"", b"a", bytes(1000)):
        assert receive(frames.framed(body), 1000) == body


@WAYS
def test_a_body_above_the_bound_is_refused_by_its_header_alone(receive: Receive) -> None:
    with pytest.raises(frames.FrameTooLong, match="a message of 1001 bytes; at most 1000 are read"):
        receive(frames.HEADER.pack(1001), 1000)
    with pytest.raises(frames.FrameTooLong, match="4294967295"):
        receive(b"\xff\xff\xff\xff", frames.MAX_FRAME)


@WAYS
@pytest.mark.parametrize("kept", [0, 2, 4, 7])
def test_an_end_amid_a_frame_is_an_end(receive: Receive, kept: int) -> None:
    body: bytes | None = None
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        body = receive(frames.framed(b"four")[:kept], 1000)
    assert body is None


@AT_ANY_LOAD
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_frames_of_one_stream_are_read_in_their_order(bodies: list[bytes]) -> None:
    stream = io.BytesIO()
    for body in bodies:
        frames.write_file(stream, body)
    stream.seek(0)

    def received() -> Generator[bytes]:
        while (body := frames.read_file(stream)) is not None:
            yield body

    assert list(received()) == bodies
