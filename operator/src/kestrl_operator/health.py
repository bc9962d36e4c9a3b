"""What the kubelet asks: `/healthz` fails when the operator is deaf or stuck, `/readyz` until it knows all there is."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiohttp import web

from kestrl.errors import UserInputError

Check = Callable[[], str]
"""Says what is wrong; nothing when all is well."""


async def serve(listen: str, *, alive: Check, ready: Check) -> web.AppRunner:
    """Serves both; `cleanup()` of what is returned ends it.

    Raises:
        UserInputError: The port is taken.
    """

    def answer(check: Check) -> Callable[[web.Request], object]:
        async def handle(_request: web.Request) -> web.Response:
            wrong = check()
            return web.Response(status=503 if wrong else 200, text=wrong or "ok")

        return handle

    app = web.Application()
    app.router.add_get("/healthz", answer(alive))  # pyright: ignore[reportArgumentType] - aiohttp's handler type is wider
    app.router.add_get("/readyz", answer(ready))  # pyright: ignore[reportArgumentType] - as above
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port)).start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own words repeat the address
        raise UserInputError(f"healthListen: cannot listen on {listen}: {why}") from error
    return runner
