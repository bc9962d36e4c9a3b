"""Counts of groups that were released because they had become too old to be trained on: number, age and cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class Stale:
    """Counts of stale groups. Their scenarios are retried, so that only time is lost."""

    by_age: Counter[int] = field(default_factory=Counter[int])
    """Groups by their age in steps at release."""
    seconds: float = 0.0
    """Total running time of the groups."""
    tokens: int = 0
    """Sampled tokens of groups that had ended; those of running groups are not known."""

    def add(self, *, age: int, seconds: float, tokens: int) -> None:
        """Counts one group."""
        self.by_age[age] += 1
        self.seconds += seconds
        self.tokens += tokens

    def facts(self) -> dict[str, Any]:
        """The counts in JSON form."""
        by_age = {str(age): count for age, count in sorted(self.by_age.items())}
        return {
            "groups": self.by_age.total(),
            "by_age": by_age,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
        }

    def copy(self) -> Stale:
        """The counts at this moment."""
        return replace(self, by_age=self.by_age.copy())
