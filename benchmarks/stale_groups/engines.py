"""The simulated engines' time."""

from __future__ import annotations

import heapq


class Engines:
    """Engines that share their time equally among the turns they sample: a clock that runs slower with more of them."""

    def __init__(self, slots: int) -> None:
        self._slots, self.clock, self._turns = slots, 0.0, list[tuple[float, int]]()

    def _pace(self) -> float:
        return min(1.0, self._slots / len(self._turns))

    def add(self, number: int, work: float) -> None:
        heapq.heappush(self._turns, (self.clock + work, number))

    def next_end(self) -> float:
        """Seconds until the first turn ends."""
        return max(0.0, self._turns[0][0] - self.clock) / self._pace() if self._turns else float("inf")

    def run(self, seconds: float) -> None:
        if self._turns:
            self.clock += seconds * self._pace()

    def pop(self) -> int:
        end, number = heapq.heappop(self._turns)
        self.clock = max(self.clock, end)
        return number

    def cancel(self, numbers: set[int]) -> dict[int, float]:
        """Removes turns; returns the work that each still had."""
        gone = {number: max(0.0, end - self.clock) for end, number in self._turns if number in numbers}
        self._turns = [turn for turn in self._turns if turn[1] not in numbers]
        heapq.heapify(self._turns)
        return gone
