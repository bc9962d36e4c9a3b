"""A real HTTP server that repeats what it was sent, in every form in which servers do."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

from aiohttp import web

FORMS: Mapping[str, Callable[[str], str]] = {
    "plain": str,
    "json": json.dumps,
    "python": repr,
    "html": html.escape,
    "url": lambda text: quote(text, safe=""),
    "hex": lambda text: text.encode().hex(),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64url": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "basic": lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
}


def repeated(text: str) -> str:
    """A text in all forms."""
    return " ".join(f"{name}={form(text)}" for name, form in FORMS.items())


@asynccontextmanager
async def echoing(status: int, seen: list[str]) -> AsyncGenerator[str]:
    """URL of a server that answers everything with a status, an error with all credentials of the request and, in
    the reason, the last one of them; these are added to `seen`.
    """

    async def answer(request: web.Request) -> web.Response:
        sent = [
            value for name, value in request.headers.items() if name.lower() not in ("host", "user-agent", "accept")
        ]
        sent += request.query.values()
        seen.extend(sent)
        keys = [value.removeprefix("Bearer ") for value in sent if "canary" in value]
        text = repeated(keys[-1]) if keys else "none"
        body = {"error": {"message": f"wrong key {text}", "code": text}, "headers": {text: [text]}, "canary": keys}
        reason = f"wrong key {keys[-1]}" if keys else "wrong"
        return web.json_response(body, status=status, reason=reason)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
