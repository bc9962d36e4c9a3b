"""Many deadlines over one timer of the event loop.

Nearly every deadline is cancelled long before it passes. A timer for each (`asyncio.timeout`) costs a rollout worker 10
us, three times a turn, for an entry in the heap of the event loop. Here a deadline is an entry of a set: one timer is
set for the earliest deadline, moved only for an earlier one, and set for the next one when it fires.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

EARLY = 0.002
"""Seconds by which a timer may fire early: the clock of uvloop has a resolution of a millisecond."""


class Alarm(Protocol):
    """A deadline."""

    @property
    def at(self) -> float:
        """Time by the clock of the event loop; constant."""
        ...

    def ring(self) -> None:
        """Called once when the time is reached; must not raise."""
        ...


class Alarms:
    """The alarms of one event loop."""

    def __init__(self) -> None:
        self._set = set[Alarm]()
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0
        """Time at which the timer fires."""

    def __len__(self) -> int:
        return len(self._set)

    def add(self, alarm: Alarm) -> None:
        """Schedules an alarm; one whose time has passed rings immediately."""
        self._set.add(alarm)
        if self._timer is None or alarm.at < self._next:
            self._arm(alarm.at)

    def discard(self, alarm: Alarm) -> None:
        """Cancels an alarm."""
        self._set.discard(alarm)
        if not self._set and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = at
        self._timer = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        by = asyncio.get_running_loop().time() + EARLY
        for alarm in [alarm for alarm in self._set if alarm.at <= by]:
            self._set.discard(alarm)
            alarm.ring()
        if self._set:
            self._arm(min(alarm.at for alarm in self._set))
