"""Admission control: how many episodes may run at once, adapted to the engines' load. Pure.

Additive increase, multiplicative decrease, as in TCP (Chiu and Jain 1989): a request that
an engine preempts when its cache is full is computed a second time, so that a preemption is a clear sign of overload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FULL = 0.95
"""Share of the key-value cache in use from which on no episode is added."""
DECREASE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load that an engine reported last."""

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    """Preemptions since the engine started."""

    @property
    def full(self) -> bool:
        """Whether further episodes would only queue: the cache is used up, or more requests wait than run."""
        return self.kv_usage >= FULL or self.waiting > self.running


class EpisodeLimit:
    """A limit on concurrent episodes. There is none at first: the workers' capacity from the manifest bounds them."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._preemptions: dict[str, int] = {}
        self.limit: int | None = None

    def update(self, loads: Mapping[str, EngineLoad], *, running: int, ceiling: int) -> None:
        """Adapts the limit to the engines' reported load.

        Args:
            loads: Load by engine name.
            running: Episodes running now.
            ceiling: Capacity of the workers in episodes.
        """
        preempted = any(load.preemptions > self._preemptions.get(name, 0) for name, load in loads.items())
        # Counts of engines that do not report now are kept: their old preemptions must not count as new ones later.
        self._preemptions |= {name: load.preemptions for name, load in loads.items()}
        # The lower of limit and running episodes: a limit that has not been reached yet has no effect.
        effective = max(self._group_size, running if self.limit is None else min(self.limit, running))
        if preempted:
            self.limit = max(self._group_size, int(DECREASE * effective))
        elif loads and all(load.full for load in loads.values()):
            self.limit = effective
        elif self.limit is not None:
            grown = self.limit + self._group_size
            self.limit = grown if grown < ceiling else None

    def groups(self, running: int) -> int | None:
        """Groups that may start next to `running` episodes, at least one when none runs; None for no limit."""
        if self.limit is None:
            return None
        return max(int(running == 0), (self.limit - running) // self._group_size)
