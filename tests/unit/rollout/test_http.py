"""The worker's HTTP client against a server that sends whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl_rollout.engine import http
from kestrl_rollout.engine.http import HttpAnswer, Lost, PostClient, Unreachable

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
async def serving(play: Play, tls: ssl.SSLContext | None = None) -> AsyncGenerator[tuple[Server, PostClient]]:
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
        ending = asyncio.current_task()
        assert ending is not None
        tasks.add(ending)
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

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        async with PostClient({"authorization": "Bearer key"}) as client:
            yield seen, client
    finally:
        server.close()
        await server.wait_closed()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


async def test_what_is_sent_and_what_comes_back() -> None:
    async with serving(saying(OK)) as (server, client):
        answer = await client.post(server.url, b'{"a": 1}', {"traceparent": "00-1-2-01"})
    assert answer == HttpAnswer(200, b"ok")
    assert server.bodies == [b'{"a": 1}']
    line, *fields = server.heads[0].lower().split("\r\n")[:-2]
    assert line == "post /generate http/1.1"
    assert {"authorization: bearer key", "traceparent: 00-1-2-01", "content-length: 8"} < set(fields)
    assert f"host: 127.0.0.1:{server.port}" in fields


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
        await asyncio.wait_for(server.left.wait(), 20)
        await client.post(server.url, b"", {})
        assert server.connections == 2


async def test_the_clients_end_closes_idle_connections() -> None:
    async with serving(saying(OK)) as (server, client):
        await client.post(server.url, b"", {})
        await client.__aexit__(None, None, None)
        await asyncio.wait_for(server.left.wait(), 20)


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_error_is_an_answer_too(status: int) -> None:
    async with serving(saying(f"HTTP/1.1 {status} Whatever\r\nContent-Length: 3\r\n\r\nwhy".encode())) as (
        server,
        client,
    ):
        assert await client.post(server.url, b"", {}) == HttpAnswer(status, b"why")


async def test_the_policy_that_a_guard_stamped_is_part_of_the_answer() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Kestrl-Policy: job-7.3\r\nContent-Length: 2\r\n\r\nok"
    async with serving(saying(head)) as (server, client):
        assert await client.post(server.url, b"", {}) == HttpAnswer(200, b"ok", "job-7.3")


async def test_go_on_is_not_yet_the_answer() -> None:
    async with serving(saying(b"HTTP/1.1 100 Continue\r\n\r\n", OK)) as (server, client):
        for _ in range(2):
            assert await client.post(server.url, b"", {}) == HttpAnswer(200, b"ok")
        assert server.connections == 1


@pytest.mark.parametrize("pieces", [1, 3, 7])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_is_whole_however_it_is_cut(pieces: int, chunked: bool) -> None:
    body = bytes(range(256)) * 40
    if chunked:
        said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        said += (
            b"".join(b"%x\r\n%b\r\n" % (2_560, body[at : at + 2_560]) for at in range(0, len(body), 2_560))
            + b"0\r\n\r\n"
        )
    else:
        said = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    size = -(-len(said) // pieces)
    async with serving(saying(*(said[at : at + size] for at in range(0, len(said), size)))) as (server, client):
        assert [await client.post(server.url, b"", {}) for _ in range(2)] == [HttpAnswer(200, body)] * 2
        assert server.connections == 1


async def test_a_compressed_answer_is_neither_asked_for_nor_expanded() -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz"
    async with serving(saying(said)) as (server, client):
        assert (await client.post(server.url, b"", {})).body == b"zzzz"
        assert "accept-encoding" not in server.heads[0].lower()


async def test_a_redirect_is_an_answer_and_no_cookie_is_kept() -> None:
    said = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /other\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
    async with serving(saying(said)) as (server, client):
        for _ in range(2):
            assert (await client.post(server.url, b"", {})).status == 307
        assert [head.split()[1] for head in server.heads] == ["/generate"] * 2
        assert "cookie" not in server.heads[1].lower()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "ServerDisconnectedError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "not completed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "not completed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "ClientResponseError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "ClientResponseError"),
    ],
    ids=["nothing", "half", "half a chunk", "no HTTP", "two lengths"],
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
            assert await client.post(server.url, b"", {}) == HttpAnswer(200, b"ok")
            assert server.connections == count


async def test_who_waits_no_longer_ends_the_request() -> None:
    async with serving(never) as (server, client):
        asking = asyncio.create_task(client.post(server.url, b"", {}))
        await server.asked.wait()
        asking.cancel()
        await asyncio.wait_for(server.left.wait(), 20)
        assert asking.cancelled()


async def test_nobody_there() -> None:
    async with PostClient({}) as client:
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
        async with PostClient({}) as client:
            with pytest.raises(Unreachable, match=r"(?i)timeout"):
                await client.post(f"http://127.0.0.1:{port}/", b"", {})
        for waiting in crowd:
            waiting.close()


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
        assert f"host: engine-0.engines:{server.port}" in server.heads[0].lower()
        leads_to.clear()
        with pytest.raises(Unreachable, match="not known"):
            await client.post(f"http://engine-1.engines:{server.port}/", b"", {})


POSTING = """
import asyncio, sys
from kestrl_rollout.engine.http import PostClient

async def main():
    async with PostClient({}) as client:
        print(await client.post(sys.argv[1], b"", {}))

asyncio.run(main())
"""


async def posted(url: str, **environment: str) -> str:
    """Output of a client process, whose trusted certificates are those of its environment."""
    command = (sys.executable, "-W", "error", "-c", POSTING, url)
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, **pipes, env=environment)
    return (await process.communicate())[0].decode()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Certificate of a server, signed by itself; its key is in the same file."""
    path = tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    made += ["-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key.pem")]
    subprocess.run([*made, "-out", str(path)], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "key.pem").read_text())
    return path


async def test_a_remote_engines_certificate_is_checked(certificate: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with serving(saying(OK), tls) as (server, _):
        url = server.url.replace("http:", "https:")
        assert "Unreachable" in await posted(url)
        assert "HttpAnswer(status=200, body=b'ok'" in await posted(url, SSL_CERT_FILE=str(certificate))


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb"])
async def test_a_header_cannot_smuggle_another(value: str) -> None:
    async with serving(saying(OK)) as (server, client):
        with pytest.raises(ValueError, match="header injection"):
            await client.post(server.url, b"", {"tracestate": value})
        assert server.heads == []


@pytest.mark.parametrize(("after", "target"), [("", "/"), ("/", "/"), ("/a/t?t=1", "/a/t?t=1")])
async def test_the_path_is_what_follows_the_address(monkeypatch: pytest.MonkeyPatch, after: str, target: str) -> None:
    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with serving(saying(OK)) as (server, client):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        # A host whose name stands in the address twice.
        await client.post(f"http://t:{server.port}{after}", b"", {})
        assert server.heads[0].startswith(f"POST {target} HTTP/1.1\r\nHost: t:{server.port}\r\n")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/", "engine:8000", "http:///generate"])
async def test_what_is_no_address_is_refused(url: str) -> None:
    async with PostClient({}) as client:
        with pytest.raises(ValueError, match=r"not an http://|Invalid URL"):
            await client.post(url, b"", {})
