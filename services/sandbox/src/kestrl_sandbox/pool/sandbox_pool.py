"""A pool of sandboxes: places, a bounded queue, warm slots, a cap on starts, and a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from kestrl.errors import UserInputError
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Capabilities, Result, Run, SandboxBusy, SandboxFailure
from kestrl_sandbox.pool.breaker import Breaker
from kestrl_sandbox.pool.slots import SlotLost

log = logging.getLogger(__name__)
STARTING = 4
"""Sandboxes that start at the same time; further ones wait."""


class AnySlot(Protocol):
    """A place of a back-end that runs one request at a time, each in a fresh sandbox, or those of one session."""

    alive: bool
    """Whether the state of a session is still there."""

    @property
    def single_use(self) -> bool:
        """Whether it serves one run or session only."""
        ...

    @property
    def usable(self) -> bool:
        """Whether a further run can start here."""
        ...

    async def run(self, run: Run, *, session: bool) -> Result:
        """Runs code.

        Raises:
            SandboxFailure: The sandbox failed; `SlotLost` if its processes ended without an answer.
        """
        ...

    def close(self) -> None:
        """Ends what runs in it."""
        ...


SlotOf = TypeVar("SlotOf", bound=AnySlot)


class Backend(Protocol[SlotOf]):
    """What makes sandboxes."""

    capabilities: Capabilities

    @property
    def running(self) -> bool: ...

    async def new_slot(self) -> SlotOf:
        """Starts a slot.

        Raises:
            SandboxFailure: It did not start.
        """
        ...

    def kill_slot(self, slot: SlotOf) -> None:
        """Kills what is left of a slot."""
        ...

    async def close(self) -> None:
        """Ends everything that it has started."""
        ...


class SandboxPool:
    """A pool of sandboxes of one back-end. Belongs to the event loop that it was started in."""

    def __init__(
        self, config: PoolConfig, start: Callable[[PoolConfig], Awaitable[Backend[Any]]], backend: Backend[Any]
    ) -> None:
        self._config = config
        self._start = start
        self._backend: Backend[Any] | None = backend
        self._capabilities = backend.capabilities
        self._places = asyncio.Semaphore(config.max_sandboxes)
        self._starting = asyncio.Semaphore(STARTING)
        self._restart = asyncio.Lock()
        self._idle: deque[AnySlot] = deque()
        self._breaker = Breaker()
        self.waiting = 0
        """Runs that wait for a place."""
        self.running = 0
        """Runs and sessions in progress."""

    @classmethod
    async def start(
        cls, start: Callable[[PoolConfig], Awaitable[Backend[Any]]], config: PoolConfig | None = None
    ) -> SandboxPool:
        """Starts a back-end, such as `Zygote.start`.

        Raises:
            SandboxFailure: This node does not allow what it needs.
        """
        config = config or PoolConfig()
        return cls(config, start, await start(config))

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def memory_mb(self) -> int:
        """Largest memory limit of a run."""
        return self._config.memory_mb

    async def run(self, run: Run) -> Result:
        run = self.prepared(run)
        async with self._place():
            try:
                return await self._run_once(run)
            except SlotLost:
                # Code in a sandbox has no effect outside of it, so that it may run again.
                return await self._run_once(run)

    async def session(self) -> PooledSession:
        """Opens a session, which takes the place of a sandbox until it is closed."""
        # Entered by hand: the place outlives this call, until the session is closed.
        holder = self._place()
        await holder.__aenter__()
        try:
            slot = await self._slot()
        except BaseException:
            await holder.__aexit__(None, None, None)
            raise

        async def release(slot: AnySlot) -> None:
            self._discard(slot)
            await holder.__aexit__(None, None, None)

        return PooledSession(self, slot, release)

    async def successor(self, slot: AnySlot) -> AnySlot:
        """Another slot for a session whose state was lost, in the place of its own where that serves no further one.

        Raises:
            SandboxFailure: None could be started.
        """
        if slot.usable and not slot.single_use:
            return slot
        self._discard(slot)
        return await self._slot()

    async def close(self) -> None:
        backend, self._backend = self._backend, None
        while self._idle:
            self._idle.popleft().close()
        if backend is not None:
            await backend.close()

    def prepared(self, run: Run) -> Run:
        """The run with the pool's limit of memory where it has none.

        Raises:
            UserInputError: It cannot be run.
        """
        run.check()
        memory_mb, limit = run.limits.memory_mb, self._config.memory_mb
        if memory_mb is None:
            return replace(run, limits=replace(run.limits, memory_mb=limit))
        if memory_mb > limit:
            raise UserInputError(f"memory_mb: the sandboxes have at most {limit}, {memory_mb} were asked for")
        return run

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        if self._places.locked() and self.waiting >= self._config.max_waiting:
            raise SandboxBusy(
                f"all {self._config.max_sandboxes} sandboxes are in use, and {self.waiting} runs wait for one"
            )
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()

    async def _run_once(self, run: Run) -> Result:
        slot = await self._slot()
        try:
            result = await slot.run(run, session=False)
        except BaseException:
            self._discard(slot)  # a cancelled run ends with its connection
            raise
        if slot.usable and not slot.single_use:
            self._idle.append(slot)
        else:
            self._discard(slot)
        return result

    async def _slot(self) -> AnySlot:
        while self._idle:
            slot = self._idle.popleft()
            if slot.usable:
                return slot
            self._discard(slot)
        # A slot that is idle is used whatever the breaker says, which is about starts.
        self._breaker.check()
        try:
            async with self._starting:
                new_slot = await self._new_slot()
        except SlotLost:
            raise  # the back-end died meanwhile, and is started again at the next attempt
        except SandboxFailure:
            self._breaker.failed()
            raise
        self._breaker.succeeded()
        return new_slot

    async def _new_slot(self) -> AnySlot:
        backend = await self._running_backend()
        try:
            return await backend.new_slot()
        except SandboxFailure as error:
            if backend.running:
                raise
            raise SlotLost(f"the back-end of the sandboxes ended: {error}") from error

    async def _running_backend(self) -> Backend[Any]:
        # Of many runs that find the back-end gone at once, one starts it again and the others use what it started.
        async with self._restart:
            backend = self._backend
            if backend is None:
                raise SandboxFailure("the sandboxes are closed", code="sandbox_closed", retryable=False)
            if not backend.running:
                log.warning("the back-end of the sandboxes has ended; it is started again")
                await backend.close()
                backend = self._backend = await self._start(self._config)
            return backend

    def _discard(self, slot: AnySlot) -> None:
        slot.close()
        if self._backend is not None:
            self._backend.kill_slot(slot)


class PooledSession:
    """A session of a pool."""

    def __init__(self, pool: SandboxPool, slot: AnySlot, release: Callable[[AnySlot], Awaitable[None]]) -> None:
        self._pool, self._slot, self._release = pool, slot, release
        self._turn = asyncio.Lock()
        self._closed = self._lost = False
        self.restarts = 0
        """How often the state was lost, by a timeout or an end of its process."""

    async def run(self, run: Run) -> Result:
        run = self._pool.prepared(run)
        async with self._turn:
            if self._closed:
                raise SandboxFailure("the session is closed", code="sandbox_closed", retryable=False)
            try:
                if self._lost:
                    self._slot = await self._pool.successor(self._slot)
                result = await self._slot.run(run, session=True)
            except BaseException:  # also of a cancelled call, whose answer the next one would read as its own
                await self.close()
                raise
            self._lost = not self._slot.alive
            self.restarts += self._lost
            return result

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._release(self._slot)
