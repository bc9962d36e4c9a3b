"""HTTP client for engines: POST requests over persistent connections, by aiohttp.

Requests are never retried or redirected: whether to try again, and where, is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
from yarl import URL

from kestrl.engines import POLICY_HEADER

KEEPALIVE_SECONDS = 3.0
"""Longest time a connection is idle before reuse. Below uvicorn's 5 s, so that none is used while the engine closes
it."""
ADDRESS_SECONDS = 10.0
"""Lifetime of cached addresses; a failed connection ends it earlier."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection: a deleted pod may not answer at all."""
ANSWER_BYTES = 64 * 1024 * 1024
"""Largest size of an answer; 32,000 tokens with their log-probs are 2 MB."""


class Unreachable(ConnectionError):
    """No connection could be made."""


class Lost(ConnectionError):
    """The connection ended before the answer did, or the answer cannot be parsed."""


class HttpAnswer(NamedTuple):
    """A server's answer."""

    status: int
    body: bytes
    policy: str | None = None
    """Name that the guard of an engine stamped on it."""


class PostClient:
    """Posts to servers, one connection per concurrent request. To be used as a context manager."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers` go with every request."""
        self._headers = headers
        self._urls: dict[str, URL] = {}
        """Parsed URLs, as many as the job has engines."""

    async def __aenter__(self) -> Self:
        # Concurrent episodes bound the connections, so that the connector need not.
        self._connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=int(ADDRESS_SECONDS)
        )
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            headers=self._headers,
            # Callers have deadlines of their own.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Posts and waits for the answer; a caller that is cancelled closes the connection, which ends the request.

        Raises:
            Unreachable: No connection can be made.
            Lost: The connection ended before the answer did.
        """
        target = self._urls.get(url)
        if target is None:
            target = self._urls[url] = _address(url)
        try:
            async with self._session.post(target, data=body, headers=headers, allow_redirects=False) as response:
                return HttpAnswer(response.status, await _body(response), response.headers.get(POLICY_HEADER))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._connector.clear_dns_cache(target.host, target.port)
            raise Unreachable(str(error)) from error
        except aiohttp.ClientError as error:
            raise Lost(f"{type(error).__name__}: {error}") from error


def _address(url: str) -> URL:
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url}: not an http:// or https:// address")
    return parsed


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if (response.content_length or 0) > ANSWER_BYTES:
        raise _too_long()
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES:
            raise _too_long()
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long() -> Lost:
    return Lost(f"the answer is longer than {ANSWER_BYTES} bytes")
