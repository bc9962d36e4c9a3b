"""Rewards: plain functions of a finished episode.

`def reward(attempt: Attempt) -> float | Sequence[float] | Score`, sync or async: a number for the episode, or one for
each of its turns. Further parameters are set by the manifest's `rewards[].config`. It runs in its own process with a
time limit. An exception becomes a typed failure: the episode then has no reward, rather than reward 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kestrl.episode import Episode, Scenario

__all__ = ["Attempt", "Score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Input of a reward: a finished episode and its scenario."""

    scenario: Scenario
    episode: Episode
    max_turns: int
    """The job's `agent.maxTurns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with metrics."""

    value: float = 0.0
    """Finite reward of the episode as a whole; any other value is a judge failure."""
    turns: Sequence[float] = ()
    """Finite reward of each turn, in order, in addition to `value`; empty if turns are not scored."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics such as `answer_correct`, 0 or 1: averaged over episodes and reported, never trained on."""

    @property
    def total(self) -> float:
        """The reward of the episode, its turns included."""
        return self.value + math.fsum(self.turns)
