"""Watches one engine: starting, ready, recovering, down. A state is always an observation."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from kestrl._shared import engine_failure
from kestrl._shared.engine_failure import EngineStartFailure
from kestrl.engines import Load, Work
from kestrl.errors import Boundary, DeadlineExceeded, EngineFailure, Failure
from kestrl.runstate.states import EngineState
from kestrl_inference.engine import BUSY, Engine, IdleSeconds, Pulse, until
from kestrl_inference.inside.drain import ASK_SECONDS, drained
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.sleeper import Sleeper
from kestrl_inference.turns import TurnEvent

log = logging.getLogger(__name__)


def came_back(before: Pulse, now: Pulse, versions: frozenset[str]) -> bool:
    """Whether a healthy engine has restarted, or has lost a verified version. Pure."""
    return not before.healthy or (before.born != now.born and before.born > 0) or not versions <= now.adapters


@dataclass(slots=True)
class Watch:
    """The engine's state, polled every `poll_seconds`."""

    engine: Engine
    adapters: LoadedAdapters
    sleeper: Sleeper
    poll_seconds: float
    component: str
    failure_file: Path | None = None
    """Where the engine writes why it could not start."""
    state: EngineState = EngineState.STARTING
    restarts: int = 0
    failure: Failure | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    """Whether the engine drains, since this agent is asked to end."""
    _seen: Pulse | None = None

    @property
    def load(self) -> Load:
        """Load at the last check."""
        return Load() if self._seen is None else self._seen.load

    @property
    def work(self) -> Work | None:
        """Work until the last check; None while the engine has not answered one."""
        return None if self._seen is None or not self._seen.healthy else self._seen.work

    @property
    def idle(self) -> IdleSeconds | None:
        """Idle time at the last check; None if it is not known."""
        return None if self._seen is None else self._seen.idle

    @property
    def reported_state(self) -> EngineState:
        """The engine's state as others are to know it."""
        if self.state is EngineState.DOWN:
            return self.state
        if self.leaving:
            return EngineState.DRAINING
        return EngineState.ASLEEP if self.sleeper.turn.shut else self.state

    async def drain(self, limit: float) -> None:
        """Drains the engine until its turns are over and others have heard of it, or it is gone.

        Args:
            limit: Seconds after which turns are left alone.
        """
        self.leaving, began = True, time.monotonic()
        log.info("%s drains: it takes no further turn", self.component)
        while True:
            try:
                running = await self.engine.drain()
            except EngineFailure as error:
                if error.code != BUSY:
                    log.info("%s has drained: %s", self.component, error)
                    return
                running = 1
            waited = time.monotonic() - began
            if drained(running, waited, limit):
                log.info("%s has drained after %.0f s, %d requests are left", self.component, waited, running)
                return
            await asyncio.sleep(ASK_SECONDS)

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self.poll_seconds)

    async def look(self) -> None:
        """Checks the engine once and updates the state."""
        before = self.adapters.proved()
        now = await self.engine.look()
        if not now.healthy:
            self._is_down(now)
            return
        if self._seen is not None and self._seen.healthy and came_back(self._seen, now, frozenset()):
            self.sleeper.apply(TurnEvent.LOST)
        try:
            await self.sleeper.appeared()
        except EngineFailure as error:
            log.warning("%s: %s; retrying", self.component, error)
            return
        await self.sleeper.keep()
        if self.sleeper.turn.shut:
            self._rests(now)
            return
        # Only versions verified before and after the check: others may have been loaded or retired meanwhile.
        await self._is_up(now, before & self.adapters.proved())

    async def doubt(self) -> None:
        """Checks immediately whether the engine still answers, after a lost connection. Other changes are handled by
        the next poll.
        """
        if not (now := await self.engine.look()).healthy:
            self._is_down(now)

    async def _is_up(self, now: Pulse, versions: frozenset[str]) -> None:
        if self._seen is None or self.state is EngineState.STARTING:
            try:
                await self.adapters.unload_earlier()
            except EngineFailure as error:
                log.warning("%s: %s; retrying", self.component, error)
                return
        elif came_back(self._seen, now, versions):
            self.restarts += 1
            self.state = EngineState.RECOVERING
            log.warning("%s is back (restart %d); reloading and verifying its versions", self.component, self.restarts)
            await self.adapters.settle(lost=True)
        elif not self.adapters.settled():
            await self.adapters.settle(lost=False)
        self._seen = now
        settled = self.adapters.settled()
        self.state, self.failure = EngineState.READY if settled else EngineState.RECOVERING, None
        if self.failure_file is not None:
            self.failure_file.unlink(missing_ok=True)  # the record of an earlier start
        self.up.set()

    def _rests(self, now: Pulse) -> None:
        """The engine answers and gets neither loads nor proofs of this: its turn is over, or not yet begun."""
        if self._seen is not None and came_back(self._seen, now, frozenset()):
            self.restarts += 1
            log.warning("%s is back (restart %d) in the learner's turn", self.component, self.restarts)
            self.adapters.unprove("the engine has restarted")
        if self.state is EngineState.DOWN:
            self.state, self.failure = EngineState.RECOVERING, None
        self._seen = now

    def _is_down(self, now: Pulse) -> None:
        self._seen = now
        self.sleeper.apply(TurnEvent.LOST)
        if self.failure_file is not None and (start_failure := engine_failure.read(self.failure_file)) is not None:
            self._cannot_start(start_failure)
        if self.state is EngineState.STARTING:
            return
        if self.state is not EngineState.DOWN:
            log.error("%s: the engine stopped answering: %s", self.component, now.reason)
        self.state = EngineState.DOWN
        self.failure = self.failure or Failure(
            boundary=Boundary.ENGINE,
            code="engine_down",
            message=f"the engine stopped answering: {now.reason}",
            retryable=True,
            component=self.component,
        )
        self.adapters.unprove(now.reason)
        self.up.clear()

    def _cannot_start(self, start_failure: EngineStartFailure) -> None:
        """Applies the record of why the engine's last start failed."""
        if self.failure is None or self.failure.code != engine_failure.CODE:
            log.error("%s: the engine does not start: %s", self.component, start_failure.message)
        self.failure = Failure(
            boundary=Boundary.ENGINE,
            code=engine_failure.CODE,
            message=f"the engine does not start: {start_failure.message}",
            retryable=not start_failure.lasting,
            component=self.component,
        )

    async def wait_until_up(self, seconds: float) -> None:
        """Waits for an engine that is starting or down.

        Raises:
            EngineFailure: The engine can never start (code `engine_cannot_start`).
            DeadlineExceeded: The engine did not start in time.
        """
        if self.failure is not None and self.failure.code == engine_failure.CODE and not self.failure.retryable:
            raise EngineFailure(self.failure.message, code=self.failure.code, retryable=False)
        if not await until(seconds, self.up):
            reason = f": {self._seen.reason}" if self._seen is not None and self._seen.reason else ""
            raise DeadlineExceeded(
                f"{self.component}: the engine was not up after {seconds:g} s{reason}", boundary=Boundary.ENGINE
            )
