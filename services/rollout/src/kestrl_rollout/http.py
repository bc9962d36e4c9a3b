"""HTTP/1.1 as engines speak it: a body posted, the whole answer back, over connections that are kept.

httptools (llhttp, uvicorn's parser) reads the answers. aiohttp does what any client may want, for 150 us of a core a request, a third of all that a
turn cost; this takes 25 (docs/performance.md). It knows no redirects, proxies, cookies, compression or TLS: an engine is in the job's own pods,
and what is not understood is a lost connection, never a guess.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httptools

KEEPALIVE_SECONDS = 3.0
"""That an idle connection is used again. Below uvicorn's 5 s, so that none is used in the moment the engine closes it."""
ADDRESS_SECONDS = 10.0
"""That a name's addresses are believed; until a connection fails at the most."""
CONNECT_SECONDS = 10.0
"""For a connection to one address: a pod that is gone may answer nothing at all."""
ANSWER_BYTES = 64 * 1024 * 1024
"""Of one answer at the most: 32,000 tokens with their log-probs are 2 MB."""


class Unreachable(ConnectionError):
    """No connection could be made."""


class Lost(ConnectionError):
    """The connection ended before the answer did, or what came is no answer."""


class Answer(NamedTuple):
    """What a server said."""

    status: int
    body: bytes


class _Connection(asyncio.Protocol):
    """A connection, for one request at a time."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answer: asyncio.Future[Answer] | None = None
        """Of the request at hand."""
        self._parts: list[bytes] = []
        self._size = 0
        self.open = False
        """Whether another request may be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = transport, True

    async def ask(self, request: bytes) -> Answer:
        """Sends a request and waits for its answer. Who stops waiting must close the connection: that is how an engine learns it.

        Raises:
            Lost: There will be none.
        """
        if not self.open:
            raise Lost("the server closed the connection before it was asked")
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()  # `close` would wait for whoever does not read what was written

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"the answer is not understood: {error.__context__ or error}")

    def on_message_begin(self) -> None:
        """The parser has the first byte of an answer."""
        if self._answer is None:
            self._lose("an answer that nobody asked for")

    def on_body(self, part: bytes) -> None:
        """The parser has a piece of it."""
        self._size += len(part)
        if self._size > ANSWER_BYTES:
            raise ValueError(f"it is longer than {ANSWER_BYTES} bytes")
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """The parser has all of it."""
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None:
            return  # "continue", and the like: the answer is yet to come
        if not self._parser.should_keep_alive():
            self.close()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        answer, self._answer, self._parts, self._size = self._answer, None, [], 0
        if not answer.done():
            answer.set_result(Answer(status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the server closed the connection" if exc is None else f"{type(exc).__name__}: {exc}")
        self._parser = self._transport = None  # else each would keep the other until the collector of cycles comes

    def _lose(self, why: str) -> None:
        self.close()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(Lost(why))


class _Server:
    """One address to post to: its connections that are idle, and where its name leads."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url}: not an http:// address")
        self._host, self._port = parts.hostname, parts.port or 80
        fixed = _fields({"host": parts.netloc, **headers})
        target = parts._replace(scheme="", netloc="").geturl() or "/"
        self.head = f"POST {target} HTTP/1.1\r\n{fixed}"
        self._idle: list[tuple[_Connection, float]] = []
        """The longest idle first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[list[str]] | None = None
        self._looked = 0.0

    def kept(self) -> _Connection | None:
        """A connection that is idle and still good."""
        while self._idle:
            connection, since = self._idle.pop()
            if connection.open and asyncio.get_running_loop().time() - since < KEEPALIVE_SECONDS:
                return connection
            connection.close()
        return None

    def keep(self, connection: _Connection) -> None:
        """Takes a connection back that has answered."""
        if not connection.open:
            return
        loop = asyncio.get_running_loop()
        self._idle.append((connection, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEPALIVE_SECONDS, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes those that were idle for too long."""
        long_ago = loop.time() - KEEPALIVE_SECONDS
        for connection, since in self._idle:
            if since <= long_ago:
                connection.close()
        self._idle = [(connection, since) for connection, since in self._idle if connection.open]
        self._sweeping = loop.call_later(KEEPALIVE_SECONDS, self._sweep, loop) if self._idle else None

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for connection, _ in self._idle:
            connection.close()

    async def connect(self) -> _Connection:
        """A new connection.

        Raises:
            Unreachable: None of the name's addresses can be reached, or it has none.
        """
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        try:
            for address in await self._addresses(loop):
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        _, connection = await loop.create_connection(_Connection, address, self._port)
                except OSError as error:  # a timeout is one
                    failed = error
                else:
                    return connection
        except OSError as error:
            failed = error
        self._looking = None
        raise Unreachable(str(failed) or f"no answer in {CONNECT_SECONDS:g} s") from failed

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Looked up once for all who connect at a time: of five hundred, each with its own question, a cluster's name server would learn to dread us."""
        if self._looking is None or loop.time() - self._looked > ADDRESS_SECONDS:
            self._looking, self._looked = loop.create_task(self._look_up(loop)), loop.time()
            self._looking.add_done_callback(lambda looked: looked.cancelled() or looked.exception())
        return await asyncio.shield(self._looking)

    async def _look_up(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]


def _fields(headers: Mapping[str, str]) -> str:
    """Header lines.

    Raises:
        ValueError: A header holds a line's end.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header holds a line's end")
    return lines


class HttpClient:
    """Posts to servers, each request over a connection of its own: who bounds requests bounds connections."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers` go with every request."""
        self._headers = headers
        self._servers: dict[str, _Server] = {}
        """By address: as many as the job has engines."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.close()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Posts and waits for the answer; a caller that is cancelled ends the request.

        Raises:
            Unreachable: There is no connection to be had.
            Lost: It ended before the answer did.
        """
        server = self._servers.get(url)
        if server is None:
            server = self._servers[url] = _Server(url, self._headers)
        head = f"{server.head}{_fields(headers)}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        connection = server.kept() or await server.connect()
        try:
            answer = await connection.ask(head + body)
        except BaseException:
            connection.close()
            raise
        server.keep(connection)
        return answer
