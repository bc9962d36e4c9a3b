"""From the components of a reward to one score for each episode.

A `Scorer` scores a whole group at once, so that a language-model judge, which compares episodes, fits beside rules, which look at
one. Whatever goes wrong is a `Failure`, and an episode for which any component failed has no reward at all.
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
        """Unique in the job; names the component in `Episode.rewards`."""
        ...

    @property
    def weight(self) -> float: ...

    async def score(self, group: Group, *, max_turns: int) -> Mapping[str, Verdict]:
        """A verdict for every episode of the group, by episode id. Does not raise for what a verdict can say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one episode earned, or why it earned nothing."""

    episode_id: str
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None


async def judge(scorers: Sequence[Scorer], group: Group, *, max_turns: int) -> list[Judgement]:
    """Scores the episodes of a group that did not fail; all components at once."""
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
    """The weighted sum, unless a component failed; what the others said is kept beside the failure.

    A metric's name belongs to the first reward, in manifest order, that reports it; a later one's is kept as `reward.metric`.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    failure: Failure | None = None
    for scorer, verdict in parts:
        if isinstance(verdict, Score):
            rewards[scorer.name] = verdict.value
            for name, value in verdict.metrics.items():
                metrics[f"{scorer.name}.{name}" if name in metrics else name] = value
        else:
            failure = failure or verdict or _failure("reward_missing", f"{scorer.name} gave no verdict")
    total = sum(scorer.weight * rewards.get(scorer.name, 0.0) for scorer, _ in parts)
    if failure is None and not abs(total) <= LARGEST_REWARD:
        failure = _failure(
            "reward_not_finite",
            f"the weighted sum of {', '.join(rewards)} is {total}; it must be finite, {LARGEST_REWARD:g} at the most",
        )
    return Judgement(
        episode_id=episode_id,
        reward=total if failure is None else None,
        rewards=rewards,
        metrics=metrics,
        failure=failure,
    )


def _failure(code: str, message: str) -> Failure:
    return Failure(boundary=Boundary.JUDGE, code=code, message=message)
