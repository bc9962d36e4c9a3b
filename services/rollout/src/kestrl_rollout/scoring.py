"""The judge's part of a group: ask once for all episodes, match the scores by id, and never make a number of a failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kestrl import rpc
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import Episode, Group
from kestrl.errors import Boundary, Failure, JudgeFailure, KestrlError
from kestrl.rpc.codec import failure_from_proto, group_to_proto
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now

SERVICE = "kestrl.api.judge.v1.JudgeService"
RPC_SLACK = 5.0
"""Seconds by which the wire's deadline is later than ours, so that ours decides and says which one it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the judge said of one episode."""

    reward: float | None
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    failure: Failure | None


class Judge:
    """The judge, as this worker uses it."""

    def __init__(self, service: rpc.Bundle, *, component: str) -> None:
        self._service = service
        self._component = component

    async def score(self, group: Group, *, max_turns: int, ends: float) -> Group:
        """The group with rewards. An episode that could not be judged carries the failure and no reward."""
        judged = [episode for episode in group.episodes if episode.failure is None]
        if not judged:
            return group
        with span(SpanName.SCORE, {Attr.GROUP_ID: group.id}):
            try:
                scores = await self._ask(replace(group, episodes=judged), max_turns=max_turns, ends=ends)
            except KestrlError as error:
                failure = error.failure(component=self._component)
                return replace(group, episodes=[_unjudged(episode, failure) for episode in group.episodes])
        return replace(group, episodes=[self._merge(episode, scores) for episode in group.episodes])

    async def _ask(self, group: Group, *, max_turns: int, ends: float) -> dict[str, Score]:
        waiting = Waiting()
        with waiting.on(Boundary.JUDGE):
            async with deadline(Scope.GROUP, ends, waiting):
                answer = await self._service.call(
                    "ScoreGroup",
                    pb.ScoreGroupRequest(group=group_to_proto(group), max_turns=max_turns),
                    pb.ScoreGroupResponse,
                    timeout=max(0.0, ends - now()) + RPC_SLACK,
                    wait=True,
                )
        return read_scores(list(answer.scores))

    def _merge(self, episode: Episode, scores: Mapping[str, Score]) -> Episode:
        if episode.failure is not None:
            return episode
        score = scores.get(episode.id)
        if score is None:
            missing = JudgeFailure(f"the judge said nothing of episode {episode.id}", code="missing_score")
            return _unjudged(episode, missing.failure(component=self._component))
        return replace(
            episode,
            reward=score.reward,
            rewards=dict(score.rewards),
            metrics={**episode.metrics, **score.metrics},
            failure=score.failure,
        )


def read_scores(scores: Sequence[pb.EpisodeScore]) -> dict[str, Score]:
    """The scores by episode id.

    Raises:
        JudgeFailure: One episode was scored twice: which score would count?
    """
    read: dict[str, Score] = {}
    for score in scores:
        if score.episode_id in read:
            raise JudgeFailure(f"the judge scored episode {score.episode_id} twice", code="duplicate_score")
        read[score.episode_id] = _read_score(score)
    return read


def _read_score(score: pb.EpisodeScore) -> Score:
    reward = score.reward if score.HasField("reward") else None
    failure = failure_from_proto(score.failure) if score.HasField("failure") else None
    if failure is None and (reward is None or not math.isfinite(reward)):
        failure = JudgeFailure(
            f"episode {score.episode_id}: the judge gave {reward} as reward, and no reason", code="no_finite_reward"
        ).failure(component="judge")
    return Score(
        reward=None if failure is not None else reward,
        rewards=dict(score.rewards),
        metrics=dict(score.metrics),
        failure=failure,
    )


def _unjudged(episode: Episode, failure: Failure) -> Episode:
    return episode if episode.failure is not None else replace(episode, failure=failure)
