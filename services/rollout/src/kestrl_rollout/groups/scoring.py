"""Scoring of a group by the judge: one request for all episodes; scores are matched by id, and failures get no
reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kestrl._shared import rpc
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode.codec import failure_from_proto, failure_to_proto
from kestrl.errors import Boundary, Failure, JudgeFailure, KestrlError
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now

SERVICE = "kestrl.api.judge.v1.JudgeService"
RPC_SLACK = 5.0
"""Seconds by which the RPC deadline is later than the worker's, so that the worker's decides and names the scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeScore:
    """The judge's score of one episode."""

    reward: float | None
    rewards: Mapping[str, float]
    weights: Mapping[str, float]
    turns: Sequence[float]
    """The reward of each turn, included in `reward`."""
    metrics: Mapping[str, float]
    failure: Failure | None
    details_json: str = ""
    answer: str | None = None


def _spread(scores: Mapping[str, JudgeScore]) -> dict[str, float]:
    """Attributes by which a collector keeps what is worth looking at: groups with an advantage, or a low reward."""
    rewards = [score.reward for score in scores.values() if score.reward is not None]
    return {Attr.LOWEST_REWARD: min(rewards), Attr.HIGHEST_REWARD: max(rewards)} if rewards else {}


def outcomes(group: common.Group) -> dict[str, dict[str, str | float]]:
    """Attributes by which a collector keeps the episodes of a scored group that are worth looking at, by their ids."""
    mean = fmean([episode.reward for episode in group.episodes if episode.HasField("reward")] or [0.0])
    return {episode.id: {**_reward(episode, mean), **_failure(episode)} for episode in group.episodes}


def _reward(episode: common.Episode, mean: float) -> dict[str, str | float]:
    if not episode.HasField("reward"):
        return {}
    return {Attr.REWARD: episode.reward, Attr.REWARD_DISTANCE: abs(episode.reward - mean)}


def _failure(episode: common.Episode) -> dict[str, str | float]:
    if not episode.HasField("failure"):
        return {}
    failure = failure_from_proto(episode.failure)
    return {Attr.FAILURE_BOUNDARY: str(failure.boundary), Attr.ERROR_TYPE: failure.code}


class Judge:
    """Client of the judge."""

    def __init__(self, service: rpc.Bundle, *, component: str) -> None:
        self._service = service
        self._component = component

    async def score(self, group: common.Group, *, max_turns: int, ends: float) -> None:
        """Writes rewards into an encoded group. An episode that could not be judged gets the failure and no reward.

        The group stays encoded, as it is sent to the judge and then, with its scores, to the learner.
        """
        judged = [episode for episode in group.episodes if not episode.HasField("failure")]
        if not judged:
            return
        with span(SpanName.SCORE, {Attr.GROUP_ID: group.id}) as current:
            request = pb.ScoreGroupRequest(group=group, max_turns=max_turns)
            if len(judged) < len(group.episodes):
                del request.group.episodes[:]
                request.group.episodes.extend(judged)
            try:
                answer = await self._ask(request, ends=ends)
                scores = read_scores(list(answer.scores))
            except KestrlError as error:
                failure = failure_to_proto(error.failure(component=self._component))
                current.set_attributes({Attr.FAILURE_BOUNDARY: str(error.boundary), Attr.ERROR_TYPE: error.code})
                for episode in judged:
                    episode.failure.CopyFrom(failure)
                return
            current.set_attributes(_spread(scores))
        group.scoring_json = answer.details_json
        for episode in judged:
            self._write(episode, scores.get(episode.id))

    async def _ask(self, request: pb.ScoreGroupRequest, *, ends: float) -> pb.ScoreGroupResponse:
        waiting = Waiting()
        with waiting.on(Boundary.JUDGE):
            async with deadline(Scope.GROUP, ends, waiting):
                return await self._service.call(
                    "ScoreGroup",
                    request,
                    pb.ScoreGroupResponse,
                    timeout=max(0.0, ends - now()) + RPC_SLACK,
                    wait=True,
                )

    def _write(self, episode: common.Episode, score: JudgeScore | None) -> None:
        if score is None:
            failure = JudgeFailure(f"the judge returned no score for episode {episode.id}", code="missing_score")
            episode.failure.CopyFrom(failure_to_proto(failure.failure(component=self._component)))
            return
        if score.reward is not None:
            episode.reward = score.reward
        episode.rewards.update(score.rewards)
        episode.reward_weights.update(score.weights)
        episode.turn_rewards.extend(score.turns)
        episode.metrics.update(score.metrics)
        episode.scoring_json = score.details_json
        if score.answer is not None:
            episode.answer = score.answer
        if score.failure is not None:
            episode.failure.CopyFrom(failure_to_proto(score.failure))


def read_scores(scores: Sequence[pb.EpisodeScore]) -> dict[str, JudgeScore]:
    """The scores by episode id.

    Raises:
        JudgeFailure: An episode was scored twice.
    """
    by_episode: dict[str, JudgeScore] = {}
    for score in scores:
        if score.episode_id in by_episode:
            raise JudgeFailure(f"the judge scored episode {score.episode_id} twice", code="duplicate_score")
        by_episode[score.episode_id] = _read_score(score)
    return by_episode


def _read_score(score: pb.EpisodeScore) -> JudgeScore:
    reward = score.reward if score.HasField("reward") else None
    failure = failure_from_proto(score.failure) if score.HasField("failure") else None
    if failure is None and (reward is None or not math.isfinite(reward)):
        failure = JudgeFailure(
            f"episode {score.episode_id}: the judge returned the reward {reward} without a failure",
            code="no_finite_reward",
        ).failure(component="judge")
    return JudgeScore(
        reward=None if failure is not None else reward,
        rewards=dict(score.rewards),
        weights=dict(score.reward_weights),
        turns=list(score.turn_rewards),
        metrics=dict(score.metrics),
        failure=failure,
        details_json=score.details_json,
        answer=score.answer if score.HasField("answer") else None,
    )
