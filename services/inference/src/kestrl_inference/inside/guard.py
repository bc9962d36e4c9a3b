"""Access control for an engine's routes: ASGI middleware, loaded by vLLM's server (`--middleware`).

It also counts the seconds in which no request to sample or to score was being answered, and says them in a header of
what it answers to the agent. While the engine drains, it answers 503 to requests of others to data routes, except to
those that end another request; what it has passed on goes on.

Two keys, by environment variable: KESTRL_ENGINE_KEY grants the data routes (sampling); KESTRL_ENGINE_CONTROL_KEY, which
only the engine agent has, grants all routes. The lists are those of the engine's dialect (`kestrl.engines`), by
environment variable too: this uses only the standard library, so that it loads in any engine image, and runs in the
server's process, so that it adds no network hop.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
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
"""Routes that need no key, those that the data key grants, and which of them end a request:
`{"open": [["GET", "/health"]], "data": [...], "abort": [...]}`."""

IDLE_HEADER = b"x-kestrl-idle"
"""Header of answers to the agent: seconds without a request to a data route, and seconds since the start."""
DRAIN = ("POST", "/kestrl/drain")
"""The guard's own route, for the control key: drains the engine for `DRAIN_SECONDS`, and answers `{"running": n}`."""
RESUME = ("POST", "/kestrl/resume")
"""The guard's own route, for the control key: ends a drain, as when an engine has slept and woken."""
END = ("POST", "/kestrl/end")
"""The guard's own route, for the control key: ends the server at once, so that it is started anew."""
DRAIN_SECONDS = 10.0
"""How long the engine drains after a request to. Who drains it repeats the request until the engine ends; an agent that
is restarted alone leaves no engine behind that refuses every turn."""
DRAINING = "EngineDraining"
"""Type of the error with which a draining engine refuses a request."""
REFUSALS = {
    401: ("a key is required", "Forbidden"),
    403: ("this key does not grant this route", "Forbidden"),
    503: ("the engine drains and takes no further request", DRAINING),
}
"""Message and type of the error by status."""


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

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._requests

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


def _routes(value: str) -> list[frozenset[tuple[str, str]]]:
    """Open routes, data routes, and those that end a request.

    Raises:
        RuntimeError: The variable does not have them.
    """
    try:
        lists = json.loads(value)
        kinds = ("open", "data", "abort")
        return [frozenset((str(method), str(path)) for method, path in lists[kind]) for kind in kinds]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{ROUTES} must have the engine's routes, which an operator of this version sets: {error!r}"
        ) from error


class ControlGuard:
    """The middleware. Answers 401 without a key, 403 for a key that does not grant the route, and 503 to the data key
    while the engine drains, unless the request ends another.

    Args:
        app: The server behind it.
        clock: A monotonic clock.
    """

    def __init__(self, app: Application, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        data, control = os.environ.get(DATA_KEY, ""), os.environ.get(CONTROL_KEY, "")
        if not data or not control:
            raise RuntimeError(
                f"{DATA_KEY} and {CONTROL_KEY} must be set: without keys any client could replace the policy"
            )
        self._data, self._control = data.encode(), control.encode()
        self._open_routes, self._data_routes, self._abort_routes = _routes(os.environ.get(ROUTES, ""))
        self._idle = IdleCount(clock)
        self._drains_until = clock()

    def refusal(self, method: str, path: str, token: bytes) -> int | None:
        """Status to refuse a request with, or None to pass it on."""
        route = (method, path)
        if route in self._open_routes or hmac.compare_digest(token, self._control):
            return None
        if not token:
            return 401
        if route not in self._data_routes or not hmac.compare_digest(token, self._data):
            return 403
        return 503 if self._clock() < self._drains_until and route not in self._abort_routes else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._app(scope, receive, send)
            return
        status = 403 if kind != "http" else self.refusal(scope["method"], scope["path"], bearer(scope["headers"]))
        route = (scope.get("method"), scope["path"])
        if status is None and route in {DRAIN, RESUME}:
            self._drains_until = self._clock() + (DRAIN_SECONDS if route == DRAIN else 0.0)
            await _answer(200, {"running": self._idle.running}, send)
        elif status is None and route == END:
            os.kill(os.getpid(), signal.SIGKILL)
        elif status is None:
            await self._pass_on(scope, receive, send)
        elif kind == "http":
            message, error = REFUSALS[status]
            await _answer(status, {"error": {"message": message, "type": error, "code": status}}, send)
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


async def _answer(status: int, content: object, send: Send) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
