"""Combines the components of a reward into one score per episode.

A `Scorer` scores a whole group at once, so that the interface supports language-model judges, which compare episodes,
as well as rules. Errors become `Failure`s, and an episode for which any component failed has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kestrl.episode import LARGEST_REWARD, Group
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score

Verdict = Score | Failure


class Scorer(Protocol):
    """One component of the reward."""

    @property
    def name(self) -> str:
        """Name of the component in `Episode.rewards`, unique in the job."""
        ...

    @property
    def weight(self) -> float: ...

    async def score(self, group: Group, *, max_turns: int) -> Mapping[str, Verdict]:
        """Verdict of every episode of the group, by episode id. Failures are returned, not raised."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of one episode, or why it has none."""

    episode_id: str
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    turns: Sequence[float] = ()
    """The weighted reward of each turn, included in `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None


async def judge(scorers: Sequence[Scorer], group: Group, *, max_turns: int) -> list[Judgement]:
    """Scores the episodes of a group that did not fail, with all components concurrently."""
    whole = replace(group, episodes=[episode for episode in group.episodes if episode.failure is None])
    if not whole.episodes:
        return []
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(scorer.score(whole, max_turns=max_turns), name=scorer.name) for scorer in scorers]
    verdicts = [task.result() for task in running]
    return [
        combine(
            episode.id, [(scorer, verdict.get(episode.id)) for scorer, verdict in zip(scorers, verdicts, strict=True)]
        )
        for episode in whole.episodes
    ]


def combine(episode_id: str, parts: Sequence[tuple[Scorer, Verdict | None]]) -> Judgement:
    """Weighted sum, unless a component failed; values of the other components are kept beside the failure.

    If several rewards report the same metric, the first one in manifest order keeps the name; others become
    `reward.metric`.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: list[float] = []
    failure: Failure | None = None
    for scorer, verdict in parts:
        if isinstance(verdict, Score):
            rewards[scorer.name] = verdict.total
            if verdict.turns:
                turns = turns or [0.0] * len(verdict.turns)
                turns = [sum_ + scorer.weight * value for sum_, value in zip(turns, verdict.turns, strict=True)]
            for name, value in verdict.metrics.items():
                metrics[f"{scorer.name}.{name}" if name in metrics else name] = value
        else:
            failure = failure or verdict or _failure("reward_missing", f"{scorer.name} returned no verdict")
    total = sum(scorer.weight * rewards.get(scorer.name, 0.0) for scorer, _ in parts)
    if failure is None and not abs(total) <= LARGEST_REWARD:
        failure = _failure(
            "reward_not_finite",
            f"the weighted sum of {', '.join(rewards)} is {total}; it must be finite and at most {LARGEST_REWARD:g}",
        )
    return Judgement(
        episode_id=episode_id,
        reward=total if failure is None else None,
        rewards=rewards,
        turns=turns if failure is None else (),
        metrics=metrics,
        failure=failure,
    )


def _failure(code: str, message: str) -> Failure:
    return Failure(boundary=Boundary.JUDGE, code=code, message=message)
