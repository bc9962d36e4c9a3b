"""HTTP client of tools: sends requests to allowed hosts, follows redirects among them, and retries until a deadline."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Mapping
from dataclasses import dataclass, replace

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from kestrl._shared.backoff import Backoff
from kestrl.data.charsets import charset_of
from kestrl.errors import ToolFailure
from kestrl_tools.http.egress import CheckedResolver, Egress
from kestrl_tools.http.requests import HttpRequest
from kestrl_tools.servers import ServerUnavailable

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 3.0
"""Longest time a connection is idle before reuse. Below uvicorn's 5 s, so that none is used while it is closed."""
MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
SAME_METHOD = frozenset({307, 308})
"""Redirects that keep method and body."""
BACKOFF = Backoff(0.25, 10.0)
"""Pauses between attempts; longer if the server asks for it (`Retry-After`)."""
NOT_EXECUTED = frozenset({429, 503})
"""Statuses after which every method may be sent again: the server has refused the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response of which the beginning was read."""

    status: int
    reason: str
    kind: str
    """Media type, in lower case and without parameters."""
    charset: str
    body: bytes
    truncated: bool
    """Whether the body goes on after what was read."""
    retry_after: float = 0.0
    """Seconds to wait before another attempt, as the server asks."""
    authorized: bool = True
    """Whether who answered was sent the headers of the manifest."""

    @property
    def text(self) -> str:
        """The body as text; bytes that are none are replaced."""
        decoder = codecs.getincrementaldecoder(charset_of(self.charset) or "utf-8")("replace")
        return decoder.decode(self.body, final=not self.truncated)


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt without a usable response."""

    reason: str
    may_repeat: bool
    """Whether the request can be sent again without being executed twice."""
    wait: float = 0.0
    """Seconds that the server asks to wait."""


class HttpClient:
    """Connections of a provider. Sessions of episodes share them, each with cookies of its own."""

    def __init__(
        self, name: str, egress: Egress, *, concurrency: int, max_bytes: int, names: AbstractResolver | None = None
    ) -> None:
        """Describes it; nothing is opened before the first session.

        Args:
            name: Name of the provider, for messages.
            egress: Hosts and addresses that may be called.
            concurrency: Maximum concurrent requests.
            max_bytes: Maximum bytes of a response that are read.
            names: Resolver of host names; None for that of the system.
        """
        self._name, self._egress, self._names = name, egress, names
        self._slots = asyncio.Semaphore(concurrency)
        self._busy = f"all {concurrency} requests (http.concurrency) were in use"
        self._max_bytes = max_bytes
        self._connector: aiohttp.TCPConnector | None = None

    def session(self) -> aiohttp.ClientSession:
        """A session with cookies of its own; the caller closes it."""
        if self._connector is None:
            resolver = CheckedResolver(self._egress, self._names or aiohttp.ThreadedResolver())
            self._connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_SECONDS, use_dns_cache=False, resolver=resolver
            )
        return aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # unsafe: also those of hosts given by their address
            auto_decompress=False,
            trust_env=False,
            headers={"Accept": "application/json, text/*;q=0.9, */*;q=0.5", "Accept-Encoding": "identity"},
            skip_auto_headers=("Accept-Encoding",),
        )

    async def close(self) -> None:
        """Closes all connections."""
        if self._connector is not None:
            await self._connector.close()

    async def ask(
        self, session: aiohttp.ClientSession, request: HttpRequest, headers: Mapping[str, str], *, seconds: float
    ) -> Response:
        """Sends a request until there is a response of the server about it, or the time is over.

        Args:
            session: Session of the episode.
            request: The request.
            headers: Headers for the server of the request, such as credentials; no other host gets them.
            seconds: Time limit of all attempts.

        Raises:
            ServerUnavailable: The server cannot be reached, or answers with 429 or 5xx.
            EgressDenied: The request leads to a host or address that is not allowed.
            ToolFailure: The response takes too long, or cannot be used.
        """
        ending = asyncio.get_running_loop().time() + seconds
        reason, attempts = self._busy, 0
        try:
            async with asyncio.timeout_at(ending):
                while True:
                    async with self._slots:
                        reason = "" if attempts == 0 else reason
                        outcome = await self._attempt(session, request, headers)
                    if isinstance(outcome, Response):
                        return outcome
                    attempts += 1
                    reason = outcome.reason
                    wait = max(BACKOFF.pause(attempts), outcome.wait)
                    if not outcome.may_repeat or asyncio.get_running_loop().time() + wait >= ending:
                        break
                    await asyncio.sleep(wait)
        except TimeoutError:
            if not reason:
                raise ToolFailure(
                    f"{self._name}: {request.method} {request.url.path}: no response within {seconds:g} s",
                    code="tool_deadline",
                ) from None
        raise ServerUnavailable(
            f"{self._name}: {request.method} {request.url.origin()}{request.url.path}: {reason} (attempts: {attempts}, "
            f"time limit: {seconds:g} s)"
        )

    async def _attempt(
        self, session: aiohttp.ClientSession, request: HttpRequest, headers: Mapping[str, str]
    ) -> Response | FailedAttempt:
        try:
            response = await self._followed(session, request, headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return FailedAttempt(f"cannot be reached: {error}", may_repeat=True)
        except aiohttp.ClientError as error:
            return FailedAttempt(
                f"the connection was lost: {type(error).__name__}: {error}", may_repeat=request.idempotent
            )
        if response.status != 429 and response.status < 500:
            return response
        may_repeat = request.idempotent or response.status in NOT_EXECUTED
        return FailedAttempt(f"answers with {response.status} {response.reason}", may_repeat, response.retry_after)

    async def _followed(
        self, session: aiohttp.ClientSession, request: HttpRequest, headers: Mapping[str, str]
    ) -> Response:
        """The response after redirects; a host other than the request's gets no header of the manifest or the model."""
        origin, current = request.url.origin(), request
        for _ in range(MAX_REDIRECTS + 1):
            self._egress.check(current.url)
            request_headers = {**current.headers, **headers} if current.url.origin() == origin else _of_body(current)
            async with session.request(
                current.method, current.url, headers=request_headers, data=current.body, allow_redirects=False
            ) as response:
                location = response.headers.get("Location")
                if response.status not in REDIRECTS or location is None:
                    answer = await self._read(response)
                    return replace(answer, authorized=current.url.origin() == origin)
                current = self._redirected(current, response.status, location)
        raise self._unusable(request, f"more than {MAX_REDIRECTS} redirects")

    def _redirected(self, request: HttpRequest, status: int, location: str) -> HttpRequest:
        try:
            url = request.url.join(URL(location))
        except ValueError as error:
            raise self._unusable(request, f"a redirect to what is not a URL ({error})") from error
        if status in SAME_METHOD or request.method == "GET":
            return replace(request, url=url)
        return replace(request, method="GET", url=url, headers={}, body=None)

    async def _read(self, response: aiohttp.ClientResponse) -> Response:
        parts, size = list[bytes](), 0
        while size <= self._max_bytes and (part := await response.content.read(self._max_bytes + 1 - size)):
            parts.append(part)
            size += len(part)
        return Response(
            status=response.status,
            reason=response.reason or "",
            kind=response.content_type.lower(),
            charset=response.charset or "utf-8",
            body=b"".join(parts)[: self._max_bytes],
            truncated=size > self._max_bytes,
            retry_after=_seconds(response.headers.get("Retry-After")),
        )

    def _unusable(self, request: HttpRequest, problem: str) -> ToolFailure:
        return ToolFailure(f"{self._name}: {request.method} {request.url.path}: {problem}", code="tool_result_invalid")


def _of_body(request: HttpRequest) -> dict[str, str]:
    return {"Content-Type": "application/json"} if request.body is not None else {}


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header; one with a date is ignored."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
