"""How many episodes may run at once: as many as the engines can hold, found out by watching them. Pure.

Additive increase, multiplicative decrease, as in TCP (Chiu and Jain 1989): what an engine puts back for want of cache is computed a
second time, so that one preemption says more than any estimate of sequence lengths could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FULL = 0.95
"""Share of the key-value cache beyond which nothing more is added."""
DECREASE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine told it was."""

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    """Since it started."""

    @property
    def full(self) -> bool:
        """Whether more episodes would only wait: its cache is used up, or more requests wait than it works on."""
        return self.kv_usage >= FULL or self.waiting > self.running


class Admission:
    """A limit on episodes at once. It begins without one: what the workers take is the manifest's own bound."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._preemptions: dict[str, int] = {}
        self.limit: int | None = None

    def look(self, loads: Mapping[str, EngineLoad], *, running: int, most: int) -> None:
        """Takes in what the engines tell.

        Args:
            loads: By engine.
            running: Episodes that run now.
            most: Episodes that the workers would take.
        """
        preempted = any(load.preemptions > self._preemptions.get(name, 0) for name, load in loads.items())
        # Of an engine whose agent is away for a moment too, or its old preemptions would count as new ones when it is back.
        self._preemptions |= {name: load.preemptions for name, load in loads.items()}
        # What runs, where that is less than the limit: a limit that nothing has reached would not be felt.
        felt = max(self._group_size, running if self.limit is None else min(self.limit, running))
        if preempted:
            self.limit = max(self._group_size, int(DECREASE * felt))
        elif loads and all(load.full for load in loads.values()):
            self.limit = felt
        elif self.limit is not None:
            grown = self.limit + self._group_size
            self.limit = grown if grown < most else None

    def groups(self, running: int) -> int | None:
        """Groups that may be started beside so many running episodes, one at least when none run; None for any number."""
        if self.limit is None:
            return None
        return max(int(running == 0), (self.limit - running) // self._group_size)
