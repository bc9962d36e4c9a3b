"""Deadlines of episodes and of what they consist of, in one form from the plan to the rollout worker."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

NESTED = ("tool", "turn", "episode", "group", "step")
"""Names of the deadlines, each longer than the one before."""
NESTING = f"deadlines nest: {' < '.join(NESTED)}"


class RolloutDeadlines(BaseModel):
    """`rollout.deadlines` of a manifest with its defaults filled in, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tool: float
    """Of one tool call."""
    turn: float
    """Of one completion."""
    episode: float
    """Of all turns of an episode."""
    group: float
    """Of the episodes of a group and their scores, from when the last one has a slot."""
    step: float | None = None
    """Of a step's wait for groups; None means no limit. The learner's alone: rollout workers do not know of steps."""


class Overlap(NamedTuple):
    """Two deadlines of which the outside one is not the longer one, with their seconds."""

    inside: str
    short: float
    outside: str
    long: float


def overlaps(**deadlines: float | None) -> Iterator[Overlap]:
    """Deadlines by their names that leave no room for the next one inside; those that are not set are passed over."""
    limits = [(name, seconds) for name in NESTED if (seconds := deadlines.get(name)) is not None]
    for (inside, short), (outside, long) in pairwise(limits):
        if not short < long:  # also true of NaN
            yield Overlap(inside, short, outside, long)
