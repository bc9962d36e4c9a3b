"""What a reward is: a plain function of a finished episode.

`def reward(attempt: Attempt) -> float | Score`, sync or async; further parameters are set by the manifest's `rewards[].config`.
It runs in its own process with a time limit. What it raises is a typed failure: the episode then has no reward, and is never
scored 0 for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kestrl.episode import Episode, Scenario

__all__ = ["Attempt", "Score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a reward looks at."""

    scenario: Scenario
    episode: Episode
    max_turns: int
    """The job's `agent.maxTurns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with facts beside it."""

    value: float
    """Finite; anything else is a judge failure."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Such as `answer_correct` 0 or 1: averaged over episodes and shown, never trained on."""
