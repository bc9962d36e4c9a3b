"""A slot of another `kestrl sandbox serve`, over a WebSocket: the client's side."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import aiohttp
from pydantic import ValidationError

from kestrl.errors import UserInputError
from kestrl_sandbox.contract import Result, Run, SandboxFailure
from kestrl_sandbox.pool.slots import GRACE_SECONDS, SlotLost
from kestrl_sandbox.remote.wire import (
    SlotAnswer,
    SlotRequest,
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
