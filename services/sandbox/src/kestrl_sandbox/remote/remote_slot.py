"""A slot of another `kestrl sandbox serve`, over a WebSocket: the client's side and the server's."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from kestrl.errors import UserInputError
from kestrl_sandbox.contract import Result, Run, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import PooledSession, SandboxPool
from kestrl_sandbox.pool.slots import GRACE_SECONDS, SlotLost
from kestrl_sandbox.remote.wire import (
    MAX_MESSAGE,
    FailureMessage,
    Greeting,
    ResultMessage,
    SlotAnswer,
    SlotRequest,
    request_of,
)

HEARTBEAT_SECONDS = 20.0
"""Interval of pings: a peer that vanished without closing the connection is noticed after this and a half more."""
ANSWER_SECONDS = GRACE_SECONDS + 5.0
"""Seconds beyond a run's own limit after which its server counts as stuck: more than that server waits itself."""


class RemoteSlot:
    """A connection to a server; runs one request at a time."""

    single_use = False

    def __init__(self, name: str, socket: aiohttp.ClientWebSocketResponse, *, use_until: float) -> None:
        """Reads from a connection.

        Args:
            name: Name for messages.
            socket: The connection.
            use_until: `time.monotonic()` after which no further run starts here.
        """
        self.name = name
        self.alive = True
        self._socket = socket
        self._use_until = use_until
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._closing: asyncio.Task[bool] | None = None
        # Reads all the time, since pings are answered only while somebody reads.
        self._reading = asyncio.create_task(self._read())

    @property
    def usable(self) -> bool:
        return not self._reading.done() and not self._socket.closed and time.monotonic() < self._use_until

    async def greeting(self) -> str | None:
        """The server's first message; None if the connection ended before it."""
        return await self._answers.get()

    async def run(self, run: Run, *, session: bool) -> Result:
        """Runs code.

        Raises:
            SandboxFailure: The sandbox failed, or did not keep the run's limit of time.
            UserInputError: The server does not run it.
        """
        try:
            async with asyncio.timeout(run.limits.seconds + ANSWER_SECONDS):
                await self._socket.send_str(SlotRequest.of(run, session=session).model_dump_json())
                text = await self._answers.get()
        except TimeoutError as error:
            raise SandboxFailure(
                f"{self.name} did not answer {ANSWER_SECONDS:g} s after the limit of {run.limits.seconds:g} s",
                code="sandbox_stuck",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise SlotLost(f"the connection to {self.name} ended: {error}") from error
        if text is None:
            raise SlotLost(f"{self.name} ended without an answer")
        return self._result(text)

    def _result(self, text: str) -> Result:
        try:
            answer = SlotAnswer.model_validate_json(text)
        except ValidationError as error:
            raise SandboxFailure(f"{self.name} answered what is no answer: {error}", code="sandbox_protocol") from error
        self.alive = answer.alive
        if answer.failure is not None:
            raise answer.failure.error()
        if answer.result is None:
            raise UserInputError(answer.refused or "the sandbox gave no reason")
        return answer.result.result()

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._answers.put_nowait(message.data)
        finally:
            self._answers.put_nowait(None)

    def close(self) -> None:
        """Closes the connection: the server ends run and session."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._socket.close())

    async def wait_closed(self) -> None:
        """Waits until the connection is closed."""
        self.close()
        assert self._closing is not None
        with suppress(aiohttp.ClientError, OSError):
            await self._closing
        await asyncio.wait({self._reading})


class SlotServer:
    """Serves slots of a pool."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._open: set[web.WebSocketResponse] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serves one connection until it is closed."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        found = self._pool.capabilities
        greeting = Greeting(
            backend=found.backend,
            isolation=found.isolation,
            mechanisms=dict(found.mechanisms),
            memory_mb=self._pool.memory_mb,
        )
        self._open.add(socket)
        connection = _Connection(self._pool)
        try:
            await socket.send_str(greeting.model_dump_json())
            await _exchange(socket, connection)
        finally:
            self._open.discard(socket)
            await connection.close()
        return socket

    async def close(self, _app: web.Application) -> None:
        """Closes all connections, so that the server can end."""
        for socket in [*self._open]:
            await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)


async def _exchange(socket: web.WebSocketResponse, connection: _Connection) -> None:
    """Answers requests until the connection closes. Reads while code runs, so that a closed connection ends it."""
    receiving = asyncio.create_task(socket.receive())
    try:
        while (message := await receiving).type is aiohttp.WSMsgType.TEXT:
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
        asked = request_of(text)
        if isinstance(asked, SlotAnswer):
            return asked
        try:
            if not asked.session:
                return SlotAnswer(result=ResultMessage.of(await self._pool.run(asked.run())))
            if self._session is None:
                self._session = await self._pool.session()
            restarts = self._session.restarts
            result = await self._session.run(asked.run())
            return SlotAnswer(result=ResultMessage.of(result), alive=self._session.restarts == restarts)
        except SandboxFailure as error:
            return SlotAnswer(failure=FailureMessage.of(error))
        except UserInputError as error:
            return SlotAnswer(refused=str(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
