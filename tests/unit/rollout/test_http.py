"""The worker's HTTP client against a server that sends whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.ports import free_port

from kestrl_rollout import http
from kestrl_rollout.http import Answer, HttpClient, Lost, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Server:
    """Reads requests and answers each as `answer` says."""

    port: int = 0
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client closed its connection."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/generate"


Play = Callable[[asyncio.StreamWriter], Awaitable[None]]


def saying(*pieces: bytes, close: bool = False) -> Play:
    async def play(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    return play


async def never(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(play: Play) -> AsyncGenerator[tuple[Server, HttpClient]]:
    seen, tasks = Server(), set[asyncio.Task[Any]]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
            seen.heads.append(head)
            seen.bodies.append(await reader.readexactly(length))
            seen.asked.set()
            await play(writer)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(talk(reader, writer))
        tasks.add(task)
        try:
            while not task.done() and not reader.at_eof():
                await asyncio.wait([task], timeout=0.005)
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                assert isinstance(task.exception(), asyncio.IncompleteReadError | ConnectionError)
            seen.left.set()
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        async with HttpClient({"authorization": "Bearer key"}) as client:
            yield seen, client
    finally:
        server.close()
        await server.wait_closed()


async def test_what_is_sent_and_what_comes_back() -> None:
    async with serving(saying(OK)) as (server, client):
        answer = await client.post(server.url, b'{"a": 1}', {"traceparent": "00-1-2-01"})
    assert answer == Answer(200, b"ok")
    assert server.bodies == [b'{"a": 1}']
    assert server.heads[0].split("\r\n") == [
        "POST /generate HTTP/1.1",
        f"host: 127.0.0.1:{server.port}",
        "authorization: Bearer key",
        "traceparent: 00-1-2-01",
        "content-length: 8",
        "",
        "",
    ]


async def test_a_connection_is_reused_and_concurrent_requests_open_another() -> None:
    async with serving(saying(OK)) as (server, client):
        for _ in range(3):
            await client.post(server.url, b"", {})
        assert server.connections == 1
        await asyncio.gather(*(client.post(server.url, b"", {}) for _ in range(3)))
        assert server.connections == 3
        await asyncio.gather(*(client.post(server.url, b"", {}) for _ in range(3)))
        assert server.connections == 3


@pytest.mark.parametrize(
    "head", ["HTTP/1.1 200 OK\r\nConnection: close\r\n", "HTTP/1.0 200 OK\r\n"], ids=["by its header", "by its version"]
)
async def test_a_connection_that_the_server_ends_is_not_used_again(head: str) -> None:
    async with serving(saying(f"{head}Content-Length: 2\r\n\r\nok".encode())) as (server, client):
        for _ in range(2):
            assert (await client.post(server.url, b"", {})).body == b"ok"
        assert server.connections == 2


async def test_an_idle_connection_that_the_server_closed_is_not_used_again() -> None:
    async with serving(saying(OK, close=True)) as (server, client):
        for count in (1, 2):
            assert (await client.post(server.url, b"", {})).body == b"ok"
            assert server.connections == count
            await server.left.wait()
            server.left.clear()


async def test_a_connection_is_idle_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEPALIVE_SECONDS", 0.02)
    async with serving(saying(OK)) as (server, client):
        await client.post(server.url, b"", {})
        await asyncio.wait_for(server.left.wait(), 5)
        await client.post(server.url, b"", {})
        assert server.connections == 2


async def test_the_clients_end_closes_idle_connections() -> None:
    async with serving(saying(OK)) as (server, client):
        await client.post(server.url, b"", {})
        await client.__aexit__(None, None, None)
        await asyncio.wait_for(server.left.wait(), 5)


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_error_is_an_answer_too(status: int) -> None:
    async with serving(saying(f"HTTP/1.1 {status} Whatever\r\nContent-Length: 3\r\n\r\nwhy".encode())) as (
        server,
        client,
    ):
        assert await client.post(server.url, b"", {}) == Answer(status, b"why")


async def test_go_on_is_not_yet_the_answer() -> None:
    async with serving(saying(b"HTTP/1.1 100 Continue\r\n\r\n", OK)) as (server, client):
        for _ in range(2):
            assert await client.post(server.url, b"", {}) == Answer(200, b"ok")
        assert server.connections == 1


class Wire(asyncio.Transport):
    """A transport that answers in the moment it is written to."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__()
        self._answer, self.ended = answer, False

    def write(self, data: Any) -> None:
        self._answer()

    def abort(self) -> None:
        self.ended = True


@given(parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6), chunked=st.booleans(), data=st.data())
def test_an_answer_is_whole_however_it_is_cut(parts: list[bytes], chunked: bool, data: st.DataObject) -> None:
    body = b"".join(parts)
    if chunked:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        said = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1), max_size=8)))

    def answer() -> None:
        for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
            connection.data_received(said[start:end])

    async def twice() -> list[Answer]:
        return [await connection.ask(b"") for _ in range(2)]

    connection, wire = http._Connection(), Wire(answer)
    connection.connection_made(wire)
    assert asyncio.run(twice()) == [Answer(200, body)] * 2
    assert connection.open
    assert not wire.ended


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "cannot be parsed"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", "cannot be parsed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "cannot be parsed"),
    ],
    ids=["nothing", "half", "half a chunk", "no HTTP", "another protocol", "two lengths"],
)
async def test_what_is_no_answer_is_a_lost_connection(said: bytes, why: str) -> None:
    async with serving(saying(said, close=True)) as (server, client):
        with pytest.raises(Lost, match=why):
            await client.post(server.url, b"", {})
        with pytest.raises(Lost, match=why):
            await client.post(server.url, b"", {})
        assert server.connections == 2


async def test_an_answer_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES", 1000)
    said = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    async with serving(saying(said % 1000, b"x" * 1000)) as (server, client):
        assert len((await client.post(server.url, b"", {})).body) == 1000
    async with serving(saying(said % 1001, b"x" * 1001)) as (server, client):
        with pytest.raises(Lost, match="longer than 1000 bytes"):
            await client.post(server.url, b"", {})


async def test_an_extra_answer_closes_the_connection_not_the_next_request() -> None:
    async with serving(saying(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore")) as (server, client):
        for count in (1, 2):
            assert await client.post(server.url, b"", {}) == Answer(200, b"ok")
            assert server.connections == count


async def test_who_waits_no_longer_ends_the_request() -> None:
    async with serving(never) as (server, client):
        asking = asyncio.create_task(client.post(server.url, b"", {}))
        await server.asked.wait()
        asking.cancel()
        await asyncio.wait_for(server.left.wait(), 5)
        assert asking.cancelled()


async def test_nobody_there() -> None:
    async with HttpClient({}) as client:
        with pytest.raises(Unreachable, match=r"Connect call failed|refused"):
            await client.post(f"http://127.0.0.1:{free_port()}/", b"", {})


async def test_a_server_that_never_accepts_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        # Pending connections fill the accept queue: further ones get no answer.
        crowd = [socket.socket() for _ in range(8)]
        for waiting in crowd:
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        async with HttpClient({}) as client:
            with pytest.raises(Unreachable, match=r"no answer in 0\.05 s"):
                await client.post(f"http://127.0.0.1:{port}/", b"", {})
        for waiting in crowd:
            waiting.close()


async def test_a_connection_that_ends_before_it_was_used_is_lost() -> None:
    connection = http._Connection()
    connection.connection_made(Wire(lambda: None))
    connection.connection_lost(None)
    with pytest.raises(Lost, match="before the request"):
        await connection.ask(b"")


async def test_a_name_is_looked_up_once_and_again_after_a_failed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, leads_to = list[str](), ["127.0.0.2"]

    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        await asyncio.sleep(0)
        if not leads_to:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in leads_to]

    async with serving(saying(OK)) as (server, client):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        url = f"http://engine-0.engines:{server.port}/"
        with pytest.raises(Unreachable):
            await client.post(url, b"", {})
        leads_to.append("127.0.0.1")  # the second of two is there
        await asyncio.gather(*(client.post(url, b"", {}) for _ in range(5)))
        assert (asked, server.connections) == (["engine-0.engines"] * 2, 5)
        assert f"host: engine-0.engines:{server.port}" in server.heads[0]
        leads_to.clear()
        with pytest.raises(Unreachable, match="not known"):
            await client.post(f"http://engine-1.engines:{server.port}/", b"", {})


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb"])
async def test_a_header_cannot_smuggle_another(value: str) -> None:
    async with serving(saying(OK)) as (server, client):
        with pytest.raises(ValueError, match="line break"):
            await client.post(server.url, b"", {"tracestate": value})
        assert server.connections == 0


@pytest.mark.parametrize(("after", "target"), [("", "/"), ("/", "/"), ("/a/t?t=1", "/a/t?t=1")])
async def test_the_path_is_what_follows_the_address(monkeypatch: pytest.MonkeyPatch, after: str, target: str) -> None:
    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with serving(saying(OK)) as (server, client):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        # A host whose name stands in the address twice.
        await client.post(f"http://t:{server.port}{after}", b"", {})
        assert server.heads[0].startswith(f"POST {target} HTTP/1.1\r\nhost: t:{server.port}\r\n")


@pytest.mark.parametrize("url", ["https://127.0.0.1:1/", "engine:8000", "http:///generate"])
async def test_what_is_no_address_is_refused(url: str) -> None:
    async with HttpClient({}) as client:
        with pytest.raises(ValueError, match="not an http:// address"):
            await client.post(url, b"", {})
