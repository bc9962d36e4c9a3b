"""Many deadlines over one timer of the loop.

Nearly every deadline is left long before it passes. A timer for each (`asyncio.timeout`) costs a rollout worker 10 us, three times a turn: a place in
the loop's heap, taken and given back. Here one costs an entry of a set; the loop's timer is set for the earliest, moved only when an earlier one
comes, and looks for the next when it rings.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

EARLY = 0.002
"""Seconds by which a loop's timer may ring before its time: uvloop's clock counts milliseconds."""


class Alarm(Protocol):
    """What has a time."""

    @property
    def at(self) -> float:
        """When, by the loop's clock; it never changes."""
        ...

    def ring(self) -> None:
        """Called once, when the time has come; must not raise."""
        ...


class Alarms:
    """The alarms of one loop."""

    def __init__(self) -> None:
        self._set = set[Alarm]()
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0
        """When the timer rings."""

    def __len__(self) -> int:
        return len(self._set)

    def add(self, alarm: Alarm) -> None:
        """`alarm` will ring, at once if its time is over, unless it is discarded before."""
        self._set.add(alarm)
        if self._timer is None or alarm.at < self._next:
            self._arm(alarm.at)

    def discard(self, alarm: Alarm) -> None:
        """`alarm` will not ring any more."""
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
