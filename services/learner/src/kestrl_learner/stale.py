"""Groups that were given up since they had grown too old to be trained on: how many, how old, and what they had taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stale:
    """A count of such groups. Their scenarios are attempted again, so that nothing is missing from the trained mix but time."""

    by_age: Counter[int] = field(default_factory=Counter[int])
    """Groups by their age in steps when they were given up."""
    seconds: float = 0.0
    """That they had run, all together."""
    tokens: int = 0
    """Sampled tokens of those that had ended; of one that still ran nobody knows them."""

    def add(self, *, age: int, seconds: float, tokens: int) -> None:
        """One more."""
        self.by_age[age] += 1
        self.seconds += seconds
        self.tokens += tokens

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        by_age = {str(age): count for age, count in sorted(self.by_age.items())}
        return {
            "groups": self.by_age.total(),
            "by_age": by_age,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
        }

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Stale:
        """The count that `facts` wrote down; an empty one of an empty mapping."""
        by_age = Counter({int(age): int(count) for age, count in facts.get("by_age", {}).items()})
        return Stale(by_age, float(facts.get("seconds", 0.0)), int(facts.get("tokens", 0)))
