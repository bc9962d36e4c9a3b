"""Simulated cost of stragglers with staleness: groups that would be too old are released, or their step waits for them.

Discrete events with the learner's admission rule: a group takes 1 s, one in ten takes 10 s (each +- 20 %), an update
0.3 s, 8 groups per step, 200 steps. "free": engines run all groups that staleness allows; "16": at most 16 concurrent
groups.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from benchmarks.report import Row, main

from kestrl_learner.ledger.schedule import admissible

GROUPS, STEPS, UPDATE = 8, 200, 0.3
FAST, SLOW, SLOW_SHARE, SPREAD = 1.0, 10.0, 0.1, 0.2
UNBOUNDED = 10**9


class Simulation:
    """One run. Groups are (position, version, begin)."""

    def __init__(self, staleness: int, slots: int, *, wait: bool) -> None:
        chance = random.Random(1)
        slow = [chance.random() < SLOW_SHARE for _ in range(STEPS * GROUPS)]
        self.durations = [(SLOW if is_slow else FAST) * chance.uniform(1 - SPREAD, 1 + SPREAD) for is_slow in slow]
        self.staleness, self.slots, self.wait = staleness, slots, wait
        self.now, self.version, self.consumed = 0.0, 0, 0
        self.pending = list(range(STEPS * GROUPS))
        self.running: dict[int, tuple[int, int, float]] = {}
        self.ready: list[tuple[int, int]] = []
        """(version, position)."""
        self.events: list[tuple[float, int]] = []
        """(time, number of the group; -1 for the end of an update)."""
        self.number, self.training = 0, False
        self.used = self.wasted = 0.0

    def _start(self) -> None:
        outstanding = len(self.running) + len(self.ready)
        may = admissible(
            version=self.version,
            max_staleness=self.staleness,
            groups_per_step=GROUPS,
            consumed=self.consumed,
            outstanding=outstanding,
        )
        for _ in range(min(may, self.slots - len(self.running), len(self.pending))):
            position = heapq.heappop(self.pending)
            self.number += 1
            self.running[self.number] = (position, self.version, self.now)
            heapq.heappush(self.events, (self.now + self.durations[position], self.number))

    def _too_old(self, version: int, step: int) -> bool:
        return step - version > self.staleness

    def _train(self) -> None:
        for item in [item for item in self.ready if self._too_old(item[0], self.version)]:
            self.ready.remove(item)
            self.wasted += self.durations[item[1]]
            heapq.heappush(self.pending, item[1])
        awaited = self.wait and any(self._too_old(made, self.version + 1) for _, made, _ in self.running.values())
        if self.training or len(self.ready) < GROUPS or awaited:
            return
        self.ready.sort()
        self.used += sum(self.durations[position] for _, position in self.ready[:GROUPS])
        del self.ready[:GROUPS]
        self.consumed += GROUPS
        self.training = True
        heapq.heappush(self.events, (self.now + UPDATE, -1))

    def _updated(self) -> None:
        self.training, self.version = False, self.version + 1
        for number in [number for number, (_, made, _) in self.running.items() if self._too_old(made, self.version)]:
            position, _, began = self.running.pop(number)
            self.wasted += self.now - began
            heapq.heappush(self.pending, position)

    def run(self) -> tuple[float, float]:
        """Seconds of the run, and the share of group time that was released."""
        self._start()
        while self.version < STEPS:
            self.now, number = heapq.heappop(self.events)
            if number < 0:
                self._updated()
            elif number in self.running:
                position, made, _ = self.running.pop(number)
                self.ready.append((made, position))
            self._train()
            self._start()
        return self.now, self.wasted / (self.wasted + self.used)


def measure() -> Iterator[Row]:
    for name, slots in (("free", UNBOUNDED), ("16", 16)):
        for staleness in (1, 2, 4, 8):
            released, share = Simulation(staleness, slots, wait=False).run()
            waited, _ = Simulation(staleness, slots, wait=True).run()
            at = f"stale_groups/{name}/staleness_{staleness}"
            yield Row(name=f"{at}/wait", value=waited, unit="s", reference=released, against="release")
            yield Row(name=f"{at}/given_up", value=share, unit="of group time", reference=0.0, against="wait")


if __name__ == "__main__":
    main(__doc__, measure)
