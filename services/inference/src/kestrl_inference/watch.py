"""Watches one engine: starting, ready, recovering, down. A state is what was seen, never what is hoped for."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum

from kestrl.errors import Boundary, DeadlineExceeded, Failure
from kestrl_inference.engine import Engine, Pulse, until
from kestrl_inference.policies import Policies

log = logging.getLogger(__name__)


class State(StrEnum):
    """What the engine is doing."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DOWN = "down"


def came_back(before: Pulse | None, now: Pulse, wanted: frozenset[str]) -> bool:
    """Whether the engine is another process than before, or has lost a version that is wanted. Pure."""
    if not now.healthy or before is None:
        return False
    return not before.healthy or (before.born != now.born and before.born > 0) or not wanted <= now.adapters


@dataclass(slots=True)
class Watch:
    """The engine's state, kept by looking at it every `poll_seconds`."""

    engine: Engine
    policies: Policies
    poll_seconds: float
    component: str
    state: State = State.STARTING
    restarts: int = 0
    failure: Failure | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: Pulse | None = None

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self.poll_seconds)

    async def look(self) -> None:
        """One look, and what follows from it."""
        now = await self.engine.look()
        if not now.healthy:
            self._is_down(now)
            return
        proved = frozenset(name for name, held in self.policies.held.items() if held.proved)
        unproved = len(proved) < len(self.policies.held)
        if self.state is State.DOWN or came_back(self._seen, now, proved):
            self.restarts += 1
            log.warning(
                "%s is back (restart %d); its versions are loaded and proved again", self.component, self.restarts
            )
            self.state = State.RECOVERING
            await self.policies.recover()
        elif self.state is State.RECOVERING and unproved:
            await self.policies.recover()
        self._seen = now
        if all(held.proved for held in self.policies.held.values()) or self.state is State.STARTING:
            self.state, self.failure = State.READY, None
        self.up.set()

    def _is_down(self, now: Pulse) -> None:
        if self.state is State.STARTING:
            return
        if self.state is not State.DOWN:
            log.error("%s: the engine stopped answering: %s", self.component, now.reason)
        self.state = State.DOWN
        self.failure = Failure(
            boundary=Boundary.ENGINE,
            code="engine_down",
            message=f"the engine stopped answering: {now.reason}",
            retryable=True,
            component=self.component,
        )
        self.policies.unprove(now.reason)
        self.up.clear()
        self._seen = now

    async def wait_until_up(self, seconds: float) -> None:
        """Waits for an engine that is starting or down.

        Raises:
            DeadlineExceeded: It did not come up in time.
        """
        if not await until(seconds, self.up):
            raise DeadlineExceeded(
                f"{self.component}: the engine was not up after {seconds:g} s", boundary=Boundary.ENGINE
            )
