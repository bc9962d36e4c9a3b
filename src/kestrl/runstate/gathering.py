"""Rollouts of a step as they come in: every metric as its sum and the number of episodes that have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from kestrl.runstate.part import Part

FIRST = ("reward", "answer_correct", "num_turns", "tool_calls")
"""Metrics at the beginning of a line."""
LAST = ("tokens", "duration")
"""Endings of the names of metrics at its end."""


class Gathering(Part):
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
    sums: dict[str, float] = Field(default_factory=dict[str, float])
    divisors: dict[str, int] = Field(default_factory=dict[str, int])
    """Episodes that have each metric."""
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Failed episodes and groups, by boundary."""

    def with_group(self, episodes: Sequence[Mapping[str, float]], *, tokens: int, seconds: float) -> Gathering:
        """What has come in with one more group.

        Args:
            episodes: The metrics that each scored episode has.
            tokens: Their sampled tokens.
            seconds: From the begin of the step until now.
        """
        sums, divisors = dict(self.sums), dict(self.divisors)
        for facts in episodes:
            for name, value in facts.items():
                sums[name] = sums.get(name, 0.0) + value
                divisors[name] = divisors.get(name, 0) + 1
        return self.model_copy(
            update={
                "groups": self.groups + 1,
                "episodes": self.episodes + len(episodes),
                "tokens": self.tokens + tokens,
                "seconds": seconds,
                "sums": sums,
                "divisors": divisors,
            }
        )

    def with_failure(self, boundary: str, *, seconds: float) -> Gathering:
        """What has come in with one more failed episode or group."""
        failures = {**self.failures, boundary: self.failures.get(boundary, 0) + 1}
        return self.model_copy(update={"failures": failures, "seconds": seconds})

    def facts(self) -> dict[str, Any]:
        """The content as in the record of a step."""
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
        parts += [self._mean(name) for name in sorted(self.sums, key=_place) if self.divisors.get(name)]
        return "  ".join(parts)

    def _mean(self, name: str) -> str:
        total, divisor = self.sums[name], self.divisors[name]
        return f"{name} {total:.6g}/{divisor}={total / divisor:.3f}"


def _place(name: str) -> tuple[int, str]:
    """Order of a metric in a line."""
    if name in FIRST:
        return FIRST.index(name), ""
    return (len(FIRST) + name.endswith(LAST), name)
