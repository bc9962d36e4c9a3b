"""Rollouts of a step as they come in: every metric as its sum and the number of episodes that have it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST = ("reward", "answer_correct", "num_turns", "tool_calls")
"""Metrics at the beginning of a line."""
LAST = ("tokens", "duration")
"""Endings of the names of metrics at its end."""


@dataclass(slots=True, kw_only=True)
class Gathering:
    """What has come in since the last step. Episodes that failed are counted by boundary and are in no mean."""

    wanted: int = 0
    """Groups of the step."""
    groups: int = 0
    """Groups that can be trained on."""
    episodes: int = 0
    """Scored episodes of these groups."""
    tokens: int = 0
    """Sampled tokens of these episodes."""
    seconds: float = 0.0
    """From the begin of the step to the last arrival."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    divisors: dict[str, int] = field(default_factory=dict[str, int])
    """Episodes that have each metric."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Failed episodes and groups, by boundary."""

    def add_group(self) -> None:
        """Counts a group."""
        self.groups += 1

    def add_episode(self, facts: Mapping[str, float], *, tokens: int) -> None:
        """Adds a scored episode with the metrics that it has."""
        self.episodes += 1
        self.tokens += tokens
        for name, value in facts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.divisors[name] = self.divisors.get(name, 0) + 1

    def facts(self) -> dict[str, Any]:
        """The content as JSON."""
        metrics = {name: {"sum": self.sums[name], "divisor": self.divisors[name]} for name in sorted(self.sums)}
        return {
            "groups": self.groups,
            "wanted": self.wanted,
            "episodes": self.episodes,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "metrics": metrics,
            "failures": dict(sorted(self.failures.items())),
        }

    def line(self) -> str:
        """One line: progress, throughput, failures, and each metric as `sum/divisor=mean`."""
        parts = [f"rollouts {self.groups}/{self.wanted} groups", f"{self.episodes} episodes"]
        if self.seconds > 0:
            parts.append(f"{self.episodes / self.seconds:.2f} episodes/s {self.tokens / self.seconds:.0f} tokens/s")
        if self.failures:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.failures.items()))
            parts.append(f"failures {counts}")
        parts += [self._mean(name) for name in sorted(self.sums, key=_place)]
        return "  ".join(parts)

    def _mean(self, name: str) -> str:
        total, divisor = self.sums[name], self.divisors[name]
        return f"{name} {total:.6g}/{divisor}={total / divisor:.3f}"


def _place(name: str) -> tuple[int, str]:
    """Order of a metric in a line."""
    if name in FIRST:
        return FIRST.index(name), ""
    return (len(FIRST) + name.endswith(LAST), name)
