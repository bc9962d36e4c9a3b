"""A slot of another `kestrl sandbox serve`, over a WebSocket: the server's side."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from kestrl.errors import UserInputError
from kestrl_sandbox.contract import SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import PooledSession, SandboxPool
from kestrl_sandbox.remote.remote_slot import HEARTBEAT_SECONDS
from kestrl_sandbox.remote.wire import MAX_MESSAGE, FailureMessage, Greeting, ResultMessage, SlotAnswer, request_of

IDLE_SECONDS = 900.0
"""Time without a request after which a connection is closed: longer than the turns of an episode, and no longer a place
than its client has a use for it."""
MAX_CONNECTIONS = 1024


class SlotServer:
    """Serves slots of a pool."""

    def __init__(self, pool: SandboxPool, idle_seconds: float) -> None:
        self._pool, self._idle_seconds = pool, idle_seconds
        self._open: set[web.WebSocketResponse] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serves one connection until it is closed, or idle for too long."""
        if len(self._open) >= MAX_CONNECTIONS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_CONNECTIONS} connections are open")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        capabilities = self._pool.capabilities
        greeting = Greeting(
            backend=capabilities.backend,
            isolation=capabilities.isolation,
            mechanisms=dict(capabilities.mechanisms),
            memory_mb=self._pool.memory_mb,
        )
        self._open.add(socket)
        connection = _Connection(self._pool)
        try:
            await socket.send_str(greeting.model_dump_json())
            await _exchange(socket, connection, self._idle_seconds)
        finally:
            self._open.discard(socket)
            await connection.close()
        return socket

    async def close(self, _app: web.Application) -> None:
        """Closes all connections, so that the server can end."""
        for socket in [*self._open]:
            await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)


async def _exchange(socket: web.WebSocketResponse, connection: _Connection, idle_seconds: float) -> None:
    """Answers requests until the connection closes. Reads while code runs, so that a closed connection ends it."""
    receiving = asyncio.create_task(socket.receive())
    try:
        while True:
            await asyncio.wait({receiving}, timeout=idle_seconds)
            if not receiving.done():
                reason = f"no request for {idle_seconds:g} s"
                await socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION, message=reason.encode())
                return
            message = receiving.result()
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            receiving = asyncio.create_task(socket.receive())
            answering = asyncio.create_task(connection.answer(message.data))
            try:
                await asyncio.wait({receiving, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    return
                await socket.send_str(answering.result().model_dump_json())
            finally:
                answering.cancel()
                await asyncio.wait({answering})
    except ConnectionError:  # it closed while the answer was sent
        return
    finally:
        receiving.cancel()


class _Connection:
    """The runs of one connection, and its session."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._session: PooledSession | None = None

    async def answer(self, text: str) -> SlotAnswer:
        request = request_of(text)
        if isinstance(request, SlotAnswer):
            return request
        try:
            if not request.session:
                return SlotAnswer(result=ResultMessage.of(await self._pool.run(request.run())))
            if self._session is None:
                self._session = await self._pool.session()
            restarts = self._session.restarts
            result = await self._session.run(request.run())
            return SlotAnswer(result=ResultMessage.of(result), alive=self._session.restarts == restarts)
        except SandboxFailure as error:
            return SlotAnswer(failure=FailureMessage.of(error))
        except UserInputError as error:
            return SlotAnswer(refused=str(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
