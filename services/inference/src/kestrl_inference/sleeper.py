"""Puts an engine to sleep while the learner has their device, and wakes it: the effects of `turns`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kestrl.errors import Boundary, DeadlineExceeded, EngineFailure, KestrlError
from kestrl_inference.engine import Engine, EngineRefused
from kestrl_inference.inside.drain import ASK_SECONDS
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.turns import Turn, TurnCommand, TurnEvent, TurnState, after

log = logging.getLogger(__name__)
LEASE_SECONDS = 30.0
"""How long an engine that was found asleep waits for its learner."""
NO_ROUTE = frozenset({404, 405})
STAYING = frozenset({"engine_busy", "engine_cannot_sleep"})
"""Codes of failures to fall asleep after which the engine is as before."""


class Sleeper:
    """One engine's turns.

    Args:
        engine: The engine.
        adapters: Its versions, which are verified after each sleep.
        turns: Whether it shares its device in turns; otherwise it is never asked to sleep.
        clock: A monotonic clock.
    """

    def __init__(
        self, engine: Engine, adapters: LoadedAdapters, *, turns: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._adapters, self._turns, self._clock = engine, adapters, turns, clock
        self.turn = Turn()
        self._failure: KestrlError | None = None
        """Why the last order was not carried out."""
        self._lease_end = 0.0
        self._drain_end = 0.0
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    async def sleep(self, lease: float, seconds: float) -> None:
        """Puts the engine to sleep, or prolongs its sleep.

        Args:
            lease: Seconds after which it wakes by itself.
            seconds: Time limit; its running requests have half of it.

        Raises:
            EngineFailure: It cannot sleep (code `engine_cannot_sleep`), its requests do not end (`engine_busy`), or the
                learner has returned the device meanwhile (`engine_turn_over`).
            DeadlineExceeded: It does not answer, or did not fall asleep in time.
        """
        if not self._turns:
            raise EngineFailure(
                "the engine was not started to share its device in turns", code="engine_cannot_sleep", retryable=False
            )
        await self._find_out_restart()
        now = self._clock()
        self._lease_end, self._drain_end = now + seconds + lease, now + seconds / 2  # the learner waits until then
        self._failure = None
        self.apply(TurnEvent.ASKED)
        try:
            await self._reach(TurnState.ASLEEP, seconds, by_learner=True)
        finally:
            self._lease_end = self._clock() + lease

    async def wake(self, seconds: float) -> None:
        """Wakes the engine.

        Raises:
            EngineFailure: It could not be woken, or does not compute what it did before, and is being ended; or the
                learner asks for the device again (code `engine_turn_over`).
            DeadlineExceeded: It was not awake in time.
        """
        self._failure = None
        self.apply(TurnEvent.RETURNED)
        await self._reach(TurnState.AWAKE, seconds, by_learner=False)

    async def wait_awake(self, seconds: float) -> None:
        """Waits for an engine that sleeps.

        Raises:
            DeadlineExceeded: It was not awake in time.
        """
        if self.turn.shut:
            await self._reach(TurnState.AWAKE, seconds)

    async def _reach(self, state: TurnState, seconds: float, *, by_learner: bool | None = None) -> None:
        """Waits for a state, as long as the device is wanted by the learner, or is not, where `by_learner` says so."""
        try:
            async with asyncio.timeout(seconds):
                while self.turn.state is not state:
                    if self._failure is not None:
                        raise self._failure
                    if by_learner is not None and self.turn.wanted is not by_learner:
                        raise EngineFailure(
                            f"the engine is {self.turn.state}: another request, or the end of the lease, came first",
                            code="engine_turn_over",
                        )
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the engine is {self.turn.state} and was not {state} after {seconds:g} s", boundary=Boundary.ENGINE
            ) from error

    async def appeared(self) -> None:
        """Records that an engine answers which did not before.

        Raises:
            EngineFailure: It does not say whether it sleeps.
        """
        if self.turn.state is not TurnState.GONE:
            return
        if self._turns and await self._rests():
            self._lease_end = max(self._lease_end, self._clock() + LEASE_SECONDS)
            self.apply(TurnEvent.RESTING)
        else:
            self.apply(TurnEvent.BACK)

    async def _rests(self) -> bool:
        """Whether the engine sleeps. One without routes for it is awake, and fails when it is to sleep."""
        try:
            return await self._engine.sleeping()
        except EngineRefused as error:
            if error.status in NO_ROUTE:
                return False
            raise

    async def keep(self) -> None:
        """Keeps requests of others out while the engine is not awake, and ends a lease that has run out."""
        if self.turn.wanted and self._clock() > self._lease_end:
            log.warning("the learner's lease of the device has run out")
            self.apply(TurnEvent.RETURNED)
        try:
            await self._find_out_restart()
            if self.turn.state is TurnState.ENDING:
                await self._end()
            elif self.turn.shut:
                await self._engine.drain()
        except EngineFailure as error:
            log.warning("the engine does not answer: %s", error)

    async def _find_out_restart(self) -> None:
        """Asks an engine whether it still sleeps: one that was started anew between two looks has all its memory.

        Raises:
            EngineFailure: It does not answer.
        """
        turn = self.turn
        if turn.state is not TurnState.ASLEEP or await self._engine.sleeping():
            return
        if self.turn is turn:  # otherwise it was woken meanwhile
            log.warning("the engine was started anew in the learner's turn")
            self.apply(TurnEvent.LOST)
            self._adapters.unprove("the engine has restarted")
            self.apply(TurnEvent.BACK)

    async def _end(self) -> None:
        await self._engine.end()
        self.apply(TurnEvent.LOST)

    def apply(self, event: TurnEvent) -> None:
        """Applies an event and begins what follows from it."""
        earlier_turn = self.turn
        self.turn, command = after(self.turn, event)
        if self.turn.state is not earlier_turn.state:
            log.info("the engine is %s (%s)", self.turn.state, event)
        if event is TurnEvent.LOST and self._work is not None and self._work is not asyncio.current_task():
            self._work.cancel()
        if command is not None:
            self._work = asyncio.create_task(self._perform(command), name=f"engine-{command}")
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _perform(self, command: TurnCommand) -> None:
        try:
            event = await self._event(command)
        except KestrlError as error:
            self._failure = error
            log.error("the engine cannot %s: %s", command, error)
            event = TurnEvent.STAYED if error.code in STAYING else TurnEvent.FAILED
            if event is TurnEvent.FAILED:
                self._adapters.unprove(str(error))
        if event is not None:
            self.apply(event)

    async def _event(self, command: TurnCommand) -> TurnEvent | None:
        match command:
            case TurnCommand.SLEEP:
                await self._fall_asleep()
                return TurnEvent.SLEPT
            case TurnCommand.WAKE:
                await self._engine.wake()
                await self._require(asleep=False)
                return TurnEvent.WOKE
            case TurnCommand.PROVE:
                await self._adapters.prove_again()
                return TurnEvent.PROVED
            case TurnCommand.OPEN:
                if self._turns:
                    await self._engine.resume()
            case TurnCommand.END:
                await self._end()
        return None

    async def _fall_asleep(self) -> None:
        """Waits for running requests, and gives the memory up.

        Raises:
            EngineFailure: A request has not ended in time (code `engine_busy`), or the engine refuses to sleep
                (`engine_cannot_sleep`), or does not answer.
        """
        self._adapters.unprove("the engine sleeps, since the learner has their device", asleep=True)
        await self._adapters.quiet()
        while running := await self._engine.drain():
            if self._clock() > self._drain_end:
                raise EngineFailure(
                    f"{running} requests did not end in time for the learner to have the device", code="engine_busy"
                )
            await asyncio.sleep(ASK_SECONDS)
        try:
            await self._engine.sleep()
        except EngineRefused as error:
            if error.status in NO_ROUTE:
                raise EngineFailure(
                    f"this engine cannot sleep; set spec.inference.sharing: split ({error})",
                    code="engine_cannot_sleep",
                    retryable=False,
                ) from error
            raise
        await self._require(asleep=True)

    async def _require(self, *, asleep: bool) -> None:
        """Checks what the engine says of itself after it was asked to sleep or to wake.

        Raises:
            EngineFailure: It says otherwise, or does not answer.
        """
        if await self._engine.sleeping() is not asleep:
            wish = "sleep" if asleep else "wake"
            raise EngineFailure(f"the engine answered that it would {wish}, and did not", code="engine_nonsense")

    async def close(self) -> None:
        """Ends what is being done."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
