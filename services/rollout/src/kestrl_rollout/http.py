"""A minimal HTTP/1.1 client for engines: POST requests over persistent connections.

httptools (llhttp, uvicorn's parser) reads the answers. A request takes 25 us of CPU time, with aiohttp 150 us, a third
of a turn (docs/performance.md). Redirects, proxies, cookies, compression and TLS are not supported: engines run in the
job's own pods. An answer that cannot be parsed is a lost connection.
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
"""Longest time a connection is idle before reuse. Below uvicorn's 5 s, so that none is used while the engine closes
it."""
ADDRESS_SECONDS = 10.0
"""Lifetime of cached addresses; a failed connection ends it earlier."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection to one address: a deleted pod may not answer at all."""
ANSWER_BYTES = 64 * 1024 * 1024
"""Largest size of an answer; 32,000 tokens with their log-probs are 2 MB."""


class Unreachable(ConnectionError):
    """No connection could be made."""


class Lost(ConnectionError):
    """The connection ended before the answer did, or the answer cannot be parsed."""


class Answer(NamedTuple):
    """A server's answer."""

    status: int
    body: bytes


class _Connection(asyncio.Protocol):
    """A connection, for one request at a time."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answer: asyncio.Future[Answer] | None = None
        """The answer to the present request."""
        self._parts: list[bytes] = []
        self._size = 0
        self.open = False
        """Whether another request may be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = transport, True

    async def ask(self, request: bytes) -> Answer:
        """Sends a request and waits for its answer.

        A caller that stops waiting must close the connection: the engine then ends the request.

        Raises:
            Lost: The connection ended before the answer.
        """
        if not self.open:
            raise Lost("the server closed the connection before the request")
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()  # `close` would wait until the peer has read all data

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"the answer cannot be parsed: {error.__context__ or error}")

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of an answer."""
        if self._answer is None:
            self._lose("an answer without a request")

    def on_body(self, part: bytes) -> None:
        """Called by the parser with a part of the body."""
        self._size += len(part)
        if self._size > ANSWER_BYTES:
            raise ValueError(f"it is longer than {ANSWER_BYTES} bytes")
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of an answer."""
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None:
            return  # an informational response such as "continue": the answer follows
        if not self._parser.should_keep_alive():
            self.close()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        answer, self._answer, self._parts, self._size = self._answer, None, [], 0
        if not answer.done():
            answer.set_result(Answer(status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the server closed the connection" if exc is None else f"{type(exc).__name__}: {exc}")
        self._parser = self._transport = None  # breaks the reference cycle between them

    def _lose(self, why: str) -> None:
        self.close()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(Lost(why))


class _Server:
    """One URL: its idle connections and the addresses of its host."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url}: not an http:// address")
        self._host, self._port = parts.hostname, parts.port or 80
        fixed = _fields({"host": parts.netloc, **headers})
        target = parts._replace(scheme="", netloc="").geturl() or "/"
        self.head = f"POST {target} HTTP/1.1\r\n{fixed}"
        self._idle: list[tuple[_Connection, float]] = []
        """Idle connections with the time since when, the longest idle first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._lookup: asyncio.Task[list[str]] | None = None
        self._looked_up = 0.0

    def idle_connection(self) -> _Connection | None:
        """An idle connection that can be used, or None."""
        while self._idle:
            connection, since = self._idle.pop()
            if connection.open and asyncio.get_running_loop().time() - since < KEEPALIVE_SECONDS:
                return connection
            connection.close()
        return None

    def release(self, connection: _Connection) -> None:
        """Keeps a connection that has answered for further requests."""
        if not connection.open:
            return
        loop = asyncio.get_running_loop()
        self._idle.append((connection, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEPALIVE_SECONDS, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections that were idle for too long."""
        long_ago = loop.time() - KEEPALIVE_SECONDS
        for connection, since in self._idle:
            if since <= long_ago:
                connection.close()
        self._idle = [(connection, since) for connection, since in self._idle if connection.open]
        self._sweeping = loop.call_later(KEEPALIVE_SECONDS, self._sweep, loop) if self._idle else None

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._lookup is not None:
            self._lookup.cancel()
        for connection, _ in self._idle:
            connection.close()

    async def connect(self) -> _Connection:
        """A new connection.

        Raises:
            Unreachable: The name has no address that can be reached.
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
        self._lookup = None
        raise Unreachable(str(failed) or f"no answer in {CONNECT_SECONDS:g} s") from failed

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Addresses of the host, looked up once for all concurrent connections, to limit the load on the name
        server.
        """
        if self._lookup is None or loop.time() - self._looked_up > ADDRESS_SECONDS:
            self._lookup, self._looked_up = loop.create_task(self._look_up(loop)), loop.time()
            self._lookup.add_done_callback(lambda looked: looked.cancelled() or looked.exception())
        return await asyncio.shield(self._lookup)

    async def _look_up(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]


def _fields(headers: Mapping[str, str]) -> str:
    """Header lines.

    Raises:
        ValueError: A header contains a line break.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header contains a line break")
    return lines


class HttpClient:
    """Posts to servers, one connection per concurrent request."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers` go with every request."""
        self._headers = headers
        self._servers: dict[str, _Server] = {}
        """Servers by URL, as many as the job has engines."""

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
            Unreachable: No connection can be made.
            Lost: The connection ended before the answer did.
        """
        server = self._servers.get(url)
        if server is None:
            server = self._servers[url] = _Server(url, self._headers)
        head = f"{server.head}{_fields(headers)}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        connection = server.idle_connection() or await server.connect()
        try:
            answer = await connection.ask(head + body)
        except BaseException:
            connection.close()
            raise
        server.release(connection)
        return answer
