"""Idle time of the learner and of the engines in each step, by the reason.

The learner's own waits are timed where they happen. Of an engine, its server counts the seconds without a request
(`kestrl_inference.inside.guard`); why there was none is what the learner knows: whether any episode held a slot of a
worker, and if none did, whether the learner itself was waiting for groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kestrl.runstate.history import IdleTime

LATE_SECONDS = 4.0
"""Age of a server's counts when they arrive: the polls of its agent and of the learner."""


LearnerWait = Literal["groups", "policy", "evaluation"]
"""What the learner waits for: the groups of a step, engines that load and verify a version, or an evaluation."""
EngineWait = Literal["update", "work", "tools"]
"""Why an engine has no request:

* `update`: no episode runs, and the learner does not wait for groups; it computes the version that the next ones need.
* `work`: no episode runs although the learner waits: groups are scored or fail, or no worker takes one.
* `tools`: episodes run and ask nothing of this engine: they wait for tools, or other engines serve them.
"""


@dataclass(slots=True)
class _EngineTime:
    """Times of one engine since the run began, in seconds."""

    idle: float
    """Its server's count at the last look."""
    observed: float
    """Its server's age at the last look."""
    quiet: float
    """Time without episodes at the first look, or what it was when the server was counted."""
    counted: float = 0.0
    """Seconds without a request since the first look."""
    tools: float = 0.0
    """Seconds of these in which episodes ran."""


@dataclass(slots=True)
class _Lap:
    began: float
    learner: dict[LearnerWait, float] = field(default_factory=dict[LearnerWait, float])
    quiet: dict[EngineWait, float] = field(default_factory=dict[EngineWait, float])
    """Time without episodes, by reason."""
    engine_seconds: float = 0.0
    tools: float = 0.0
    without_episodes: float = 0.0
    """Seconds of engines without a request while no episode ran."""


class IdleClock:
    """Sums waits between two steps. Not for several threads.

    Args:
        clock: A monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap = _Lap(began=clock())
        self._at = self._lap.began
        self._waiting: LearnerWait | None = None
        self._episodes = 0
        self._quiet = 0.0
        """Time without episodes since the run began."""
        self._engines: dict[str, _EngineTime] = {}

    @contextmanager
    def waiting(self, wait: LearnerWait) -> Generator[None]:
        """Counts the time in the context as idle."""
        self._advance()
        before, self._waiting = self._waiting, wait
        try:
            yield
        finally:
            self._advance()
            self._waiting = before

    def count_episodes(self, change: int) -> None:
        """Adds to the number of episodes that hold a slot of a worker."""
        self._advance()
        self._episodes += change

    def observe(self, engine: str, *, idle: float, observed: float) -> None:
        """Takes the counts of an engine's server.

        Args:
            engine: Its name.
            idle: Seconds without a request since the server started.
            observed: Seconds since the server started.
        """
        self._advance()
        engine_time = self._engines.get(engine)
        if engine_time is None or observed < engine_time.observed:  # a server that has started anew is another one
            self._engines[engine] = _EngineTime(idle, observed, quiet=self._quiet - LATE_SECONDS)
            return
        seconds = observed - engine_time.observed
        idle_seconds = min(max(0.0, idle - engine_time.idle), seconds)
        engine_time.idle, engine_time.observed = idle, observed
        engine_time.counted += idle_seconds
        # The server's counts are up to `LATE_SECONDS` old and the time without episodes is not. The largest difference
        # of the totals so far is therefore what is certain: it is too small by twice that at most, over the whole run.
        tools = max(engine_time.tools, engine_time.counted - (self._quiet - engine_time.quiet))
        self._lap.engine_seconds += seconds
        self._lap.tools += tools - engine_time.tools
        self._lap.without_episodes += idle_seconds - (tools - engine_time.tools)
        engine_time.tools = tools

    def forget(self, engine: str) -> None:
        """Discards the counts of an engine that does not answer: the time until its next look is not observed."""
        self._engines.pop(engine, None)

    def lap(self) -> IdleTime:
        """Ends the step: its idle time, from the end of the one before."""
        self._advance()
        lap, self._lap = self._lap, _Lap(began=self._at)
        quiet = sum(lap.quiet.values())
        # Without any quiet time in the step, what arrives late was idle in the one before, before its first episode.
        shares = {reason: seconds / quiet for reason, seconds in lap.quiet.items()} if quiet else {"update": 1.0}
        engines = {reason: share * lap.without_episodes for reason, share in shares.items()} | {"tools": lap.tools}
        return IdleTime(
            seconds=self._at - lap.began,
            learner=_without_zeros(lap.learner),
            engine_seconds=lap.engine_seconds,
            engines=_without_zeros(engines),
        )

    def _advance(self) -> None:
        """Counts the time since the last change."""
        now = max(self._at, self._clock())
        seconds, self._at = now - self._at, now
        if self._waiting is not None:
            self._lap.learner[self._waiting] = self._lap.learner.get(self._waiting, 0.0) + seconds
        if self._episodes <= 0:
            reason = "work" if self._waiting in {"groups", "evaluation"} else "update"
            self._lap.quiet[reason] = self._lap.quiet.get(reason, 0.0) + seconds
            self._quiet += seconds


def _without_zeros(seconds: Mapping[Any, float]) -> dict[str, float]:
    return {str(reason): amount for reason, amount in sorted(seconds.items()) if amount > 0}
