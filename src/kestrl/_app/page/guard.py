"""Access to the page: with the token, by a name of this machine, and without scripts of other sites."""

from __future__ import annotations

import hmac
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import URL, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine. Other ones could be a name of somebody's site that resolves to it."""
METHODS = frozenset({"GET", "HEAD", "POST"})
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send labels with the origin null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
WITHOUT_TOKEN = "open the address that `kestrl ui` printed: this browser has not shown its token\n"  # noqa: S105


class Guard:
    """Refuses requests without the token, from other hosts and, to write, from other origins.

    Args:
        app: The application behind it.
        token: The token of the printed address. A browser exchanges it for a cookie, so that no other address holds it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._cookie = hmac.new(token.encode(), b"kestrl page", sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        """What is answered in place of the page; None for a request that may pass."""
        host = request.headers.get("host", "")
        if _hostname(host) not in NAMES:
            return PlainTextResponse("this page answers to localhost alone\n", 421)
        if request.method not in METHODS:
            return PlainTextResponse("only GET and POST\n", 405)
        if request.method == "POST" and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse("the request comes from another site\n", 403)
        if (token := request.query_params.get("token")) is not None and request.method != "POST":
            return self._exchanged(request.url, token)
        cookie = request.cookies.get(cookie_name(host), "")
        if not hmac.compare_digest(cookie.encode(), self._cookie.encode()):
            return PlainTextResponse(WITHOUT_TOKEN, 403)
        return None

    def _exchanged(self, url: URL, token: str) -> Response:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return PlainTextResponse(WITHOUT_TOKEN, 403)
        path = "/" + url.path.lstrip("/")  # two slashes would begin the name of another host
        response = RedirectResponse(path, 303)
        response.set_cookie(cookie_name(url.netloc), self._cookie, httponly=True, samesite="lax")
        return response


def cookie_name(host: str) -> str:
    """Name of the cookie: browsers do not keep cookies of two ports apart."""
    return f"kestrl_page_{_port(host)}"


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _port(host: str) -> int:
    try:
        return urlsplit(f"//{host}").port or 80
    except ValueError:
        return 80
