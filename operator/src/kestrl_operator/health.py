"""Probes: `/healthz` fails when the watch is stale, `/readyz` until all objects are known."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiohttp import web

from kestrl.errors import UserInputError

Check = Callable[[], str]
"""Returns what is wrong; an empty string when nothing is."""


async def serve(listen: str, *, alive: Check, ready: Check) -> web.AppRunner:
    """Serves both probes; `cleanup()` of the result ends it.

    Raises:
        UserInputError: The port is in use.
    """

    def answer(check: Check) -> Callable[[web.Request], object]:
        async def handle(_request: web.Request) -> web.Response:
            wrong = check()
            return web.Response(status=503 if wrong else 200, text=wrong or "ok")

        return handle

    app = web.Application()
    # aiohttp's handler type is wider
    app.router.add_get("/healthz", answer(alive))  # pyright: ignore[reportArgumentType]
    app.router.add_get("/readyz", answer(ready))  # pyright: ignore[reportArgumentType]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port)).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's message repeats the address
        raise UserInputError(f"healthListen: cannot listen on {listen}: {reason}") from error
    return runner
