"""Kinds of scenarios: their turns, tool calls and tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: tokens that the model samples, tokens that its tool answers, and the tool's seconds."""

    sampled: int
    answered: int
    tool: float


Episode = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of scenario.

    One in ten scenarios is long: its episodes take LONG times as many turns; where all have one turn, it is as many
    times as long.
    """

    name: str
    episodes: int
    """Episodes in a group."""
    turns: float
    """Mean of an episode that is not long; geometric unless 1."""
    sampled: int
    """Median of a turn's tokens; log-normal."""
    spread: float
    """Standard deviation of the logarithm of a turn's tokens."""
    tool: float
    """Mean seconds of a tool call; exponential, and one call in twenty takes ten times as long."""
    update: float
    """Seconds of an update."""

    LONG = 4

    def group(self, chance: random.Random) -> tuple[Episode, ...]:
        is_long = chance.random() < 0.1
        return tuple(self._episode(chance, is_long) for _ in range(self.episodes))

    def _episode(self, chance: random.Random, is_long: bool) -> Episode:
        factor = self.LONG if is_long else 1
        if self.turns == 1:
            return (Turn(round(factor * self.sampled * chance.lognormvariate(0, self.spread)), 0, 0.0),)
        mean, turns = self.turns * factor, 1
        while chance.random() > 1 / mean and turns < 8 * mean:
            turns += 1
        return tuple(self.turn(chance) for _ in range(turns))

    def turn(self, chance: random.Random) -> Turn:
        seconds = chance.expovariate(1 / self.tool) * (10 if chance.random() < 0.05 else 1)
        return Turn(max(1, round(self.sampled * chance.lognormvariate(0, self.spread))), 400, seconds)


WORKLOADS = (
    Workload("agent", episodes=4, turns=6, sampled=100, spread=0.5, tool=1.0, update=5.0),
    Workload("slow_tools", episodes=4, turns=6, sampled=50, spread=0.5, tool=4.0, update=5.0),
    Workload("one_turn", episodes=4, turns=1, sampled=800, spread=1.0, tool=0.0, update=5.0),
)
