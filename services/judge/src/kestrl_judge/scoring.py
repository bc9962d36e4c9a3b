"""Combines the components of a reward into one score per episode.

A `Scorer` scores a whole group at once: a rule each episode by itself, a judge model the episodes relative to each
other. Errors become `Failure`s, and an episode for which any component failed has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from kestrl.episode import LARGEST_REWARD, Json
from kestrl.errors import Boundary, Failure, JudgeFailure, SeveralProblems, UserInputError
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup

Verdict = Score | Failure


class JudgeStopped(JudgeFailure):
    """A component was closed before it had a verdict. Another judge can give one."""

    code = "judge_stopped"
    retryable = True

    def __init__(self, component: str) -> None:
        super().__init__(f"{component}: the judge is shutting down")


class ScoringGate(NamedTuple):
    """A component that decides which episodes another one scores; the others get 0 from that one."""

    component: str
    minimum: float


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """What a component found."""

    verdicts: Mapping[str, Verdict]
    """By episode id. Failures are returned, not raised."""
    episodes: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What is reported for people, such as an explanation, by episode id."""
    details: Json = None
    """How the group was scored, for people."""


class Scorer(Protocol):
    """One component of the reward, between `open` and `close`."""

    @property
    def name(self) -> str:
        """Name of the component in `Episode.rewards`, unique in the job."""
        ...

    @property
    def weight(self) -> float: ...

    @property
    def gate(self) -> ScoringGate | None:
        """The component that must pass an episode before this one scores it."""
        ...

    async def open(self) -> None:
        """Acquires what the component needs.

        Raises:
            UserInputError: It cannot be used; the message names the field and the fix.
        """
        ...

    async def close(self) -> None:
        """Releases it; pending episodes get a failure."""
        ...

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of one episode, or why it has none."""

    episode_id: str
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each component of `rewards`."""
    turns: Sequence[float] = ()
    """The weighted reward of each turn, included in `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None
    answer: str | None = None
    """Answer read by the first component that reads one."""
    details: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """By component."""


@dataclass(frozen=True, slots=True)
class GroupJudgement:
    """The judgements of a group."""

    episodes: Sequence[Judgement] = ()
    details: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How each component scored the group."""


async def open_all(scorers: Iterable[Scorer]) -> None:
    """Opens every scorer and reports every one that cannot be used.

    Raises:
        UserInputError: One line for each such scorer.
    """
    outcomes = await asyncio.gather(*(scorer.open() for scorer in scorers), return_exceptions=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for problem in problems:
        if not isinstance(problem, UserInputError):
            raise problem
    if problems:
        raise SeveralProblems([str(problem) for problem in problems])


async def judge(scorers: Sequence[Scorer], group: EncodedGroup, *, max_turns: int) -> GroupJudgement:
    """Scores the episodes of a group that did not fail: components concurrently, gated ones after the others."""
    scorable = group.without_failures()
    if not scorable.episodes:
        return GroupJudgement()
    scored: dict[str, ScoredGroup] = {}
    for gated in (False, True):
        stage = [scorer for scorer in scorers if (scorer.gate is not None) is gated]
        async with asyncio.TaskGroup() as tasks:
            running = {
                scorer.name: tasks.create_task(_score(scorer, scorable, scored, max_turns), name=scorer.name)
                for scorer in stage
            }
        scored |= {name: task.result() for name, task in running.items()}
    return GroupJudgement(
        [combine(episode.id, scorers, scored) for episode in scorable.episodes],
        {name: component.details for name, component in scored.items() if component.details is not None},
    )


async def _score(scorer: Scorer, group: EncodedGroup, scored: Mapping[str, ScoredGroup], max_turns: int) -> ScoredGroup:
    if scorer.gate is None:
        return await scorer.score(group, max_turns=max_turns)
    verdicts = scored[scorer.gate.component].verdicts
    kept_out: dict[str, Verdict] = {}
    for episode in group.episodes:
        verdict = verdicts.get(episode.id)
        if isinstance(verdict, Score) and verdict.total < scorer.gate.minimum:
            kept_out[episode.id] = Score(value=0.0, metrics={f"{scorer.name}_gated": 1.0})
        elif not isinstance(verdict, Score):
            kept_out[episode.id] = verdict or _missing(scorer.gate.component)
    let_in = group.without(kept_out)
    if not let_in.episodes:
        return ScoredGroup(kept_out)
    scores = await scorer.score(let_in, max_turns=max_turns)
    return replace(scores, verdicts={**kept_out, **scores.verdicts})


def combine(episode_id: str, scorers: Sequence[Scorer], scored: Mapping[str, ScoredGroup]) -> Judgement:
    """Weighted sum, unless a component failed; values of the other components are kept beside the failure.

    If several rewards report the same metric, the first one in manifest order keeps the name; others become
    `reward.metric`. The answer is that of the first reward that reads one.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: list[float] = []
    answer: str | None = None
    failure: Failure | None = None
    for scorer in scorers:
        verdict = scored[scorer.name].verdicts.get(episode_id)
        if isinstance(verdict, Score):
            rewards[scorer.name] = verdict.total
            answer = verdict.answer if answer is None else answer
            if verdict.turns:
                turns = turns or [0.0] * len(verdict.turns)
                turns = [sum_ + scorer.weight * value for sum_, value in zip(turns, verdict.turns, strict=True)]
            for name, value in verdict.metrics.items():
                metrics[f"{scorer.name}.{name}" if name in metrics else name] = value
        else:
            failure = failure or verdict or _missing(scorer.name)
    total = sum(scorer.weight * rewards.get(scorer.name, 0.0) for scorer in scorers)
    if failure is None and not abs(total) <= LARGEST_REWARD:
        failure = _failure(
            "reward_not_finite",
            f"the weighted sum of {', '.join(rewards)} is {total}; it must be finite and at most {LARGEST_REWARD:g}",
        )
    details = {
        name: component.episodes[episode_id] for name, component in scored.items() if episode_id in component.episodes
    }
    return Judgement(
        episode_id=episode_id,
        reward=total if failure is None else None,
        rewards=rewards,
        weights={scorer.name: scorer.weight for scorer in scorers if scorer.name in rewards},
        turns=turns if failure is None else (),
        metrics=metrics,
        failure=failure,
        answer=answer,
        details=details,
    )


def _missing(component: str) -> Failure:
    return _failure("reward_missing", f"{component} returned no verdict")


def _failure(code: str, message: str) -> Failure:
    return Failure(boundary=Boundary.JUDGE, code=code, message=message)
