"""Access control for an engine's routes: ASGI middleware, loaded by vLLM's server (`--middleware`).

It also counts the seconds in which no request to sample or to score was being answered, and says them in a header of
what it answers to the agent.

Two keys, by environment variable: KESTRL_ENGINE_KEY grants the data routes (sampling); KESTRL_ENGINE_CONTROL_KEY, which
only the engine agent has, grants all routes. The lists are those of the engine's dialect (`kestrl.engines`), by
environment variable too: this uses only the standard library, so that it loads in any engine image, and runs in the
server's process, so that it adds no network hop.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

DATA_KEY = "KESTRL_ENGINE_KEY"
CONTROL_KEY = "KESTRL_ENGINE_CONTROL_KEY"
ROUTES = "KESTRL_ENGINE_ROUTES"
"""Routes that need no key, and those that the data key grants: `{"open": [["GET", "/health"]], "data": [...]}`."""

IDLE_HEADER = b"x-kestrl-idle"
"""Header of answers to the agent: seconds without a request to a data route, and seconds since the start."""


class IdleCount:
    """Seconds without a request to a data route.

    Args:
        clock: A monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._seconds = 0.0
        self._requests = 0

    def begin(self) -> None:
        """A request begins."""
        if self._requests == 0:
            self._seconds += max(0.0, self._clock() - self._since)
        self._requests += 1

    def end(self) -> None:
        """A request has ended, by whatever way."""
        self._requests -= 1
        self._since = self._clock()

    def header(self) -> tuple[bytes, bytes]:
        """The count as a header of an answer."""
        now = self._clock()
        seconds = self._seconds + (0.0 if self._requests else max(0.0, now - self._since))
        return IDLE_HEADER, f"{seconds:.3f} {now - self._began:.3f}".encode()


def bearer(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Bearer token of a request, or an empty string."""
    for name, value in headers:
        if name == b"authorization" and value.startswith(b"Bearer "):
            return value[7:]
    return b""


def _routes(value: str) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    """Open routes and data routes.

    Raises:
        RuntimeError: The variable does not have them.
    """
    try:
        lists = json.loads(value)
        found = [frozenset((str(method), str(path)) for method, path in lists[kind]) for kind in ("open", "data")]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{ROUTES} must have the engine's routes, which an operator of this version sets: {error!r}"
        ) from error
    return found[0], found[1]


class ControlGuard:
    """The middleware. Answers 401 without a key, and 403 for a key that does not grant the route."""

    def __init__(self, app: Application) -> None:
        self._app = app
        data, control = os.environ.get(DATA_KEY, ""), os.environ.get(CONTROL_KEY, "")
        if not data or not control:
            raise RuntimeError(
                f"{DATA_KEY} and {CONTROL_KEY} must be set: without keys any client could replace the policy"
            )
        self._data, self._control = data.encode(), control.encode()
        self._open_routes, self._data_routes = _routes(os.environ.get(ROUTES, ""))
        self._idle = IdleCount()

    def refusal(self, method: str, path: str, token: bytes) -> int | None:
        """Status to refuse a request with, or None to pass it on."""
        route = (method, path)
        if route in self._open_routes or hmac.compare_digest(token, self._control):
            return None
        if not token:
            return 401
        return None if route in self._data_routes and hmac.compare_digest(token, self._data) else 403

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._app(scope, receive, send)
            return
        status = 403 if kind != "http" else self.refusal(scope["method"], scope["path"], bearer(scope["headers"]))
        if status is None:
            await self._pass_on(scope, receive, send)
        elif kind == "http":
            await self._refuse(status, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._idle.header()]
            await send(message)

        if (scope["method"], scope["path"]) not in self._data_routes:
            from_agent = hmac.compare_digest(bearer(scope["headers"]), self._control)
            await self._app(scope, receive, send_with_count if from_agent else send)
            return
        self._idle.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._idle.end()

    async def _refuse(self, status: int, send: Send) -> None:
        message = "a key is required" if status == 401 else "this key does not grant this route"
        body = json.dumps({"error": {"message": message, "type": "Forbidden", "code": status}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
