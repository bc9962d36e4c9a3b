"""Pauses that grow between attempts: the figures of each are one `Backoff` beside what it paces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between consecutive attempts, of which each but the first follows a failure.

    Args:
        first: Seconds after the first failure.
        limit: Longest pause in seconds.
        factor: Ratio of each pause to the one before.
        jitter: Share of a pause that chance may take from it, so that those who failed together come back apart.

    Raises:
        ValueError: The figures do not describe pauses that grow up to the limit.
    """

    first: float
    limit: float
    factor: float = 2.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.first <= self.limit < math.inf and 1 <= self.factor < math.inf and 0 <= self.jitter <= 1):
            raise ValueError(f"{self}: needs 0 <= first <= limit, factor >= 1 and a jitter from 0 to 1, all finite")

    def pause(self, failures: int) -> float:
        """Seconds before the next attempt after consecutive failures, of which there may be any number: none before the
        first attempt, and the longest once the limit is reached. Jitter is not taken off.
        """
        if failures < 1:
            return 0.0
        try:
            return min(self.limit, self.first * math.pow(self.factor, failures - 1))
        except OverflowError:  # something that has failed for days
            return self.limit if self.first else 0.0

    def jittered(self, failures: int, chance: Random) -> float:
        """As `pause`, less the share that chance takes."""
        return self.pause(failures) * (1 - self.jitter * chance.random())
