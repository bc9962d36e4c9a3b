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
    """The limit of one tool call."""
    turn: float
    """The limit of one completion."""
    episode: float
    """The limit of all turns of an episode."""
    group: float
    """The limit of the episodes of a group and their scores, from when the last one has a slot."""
    step: float | None = None
    """The limit of a step's wait for groups; None means none. It is the learner's: rollout workers know no steps."""


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
