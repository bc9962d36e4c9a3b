"""The gRPC service of the judge."""
# ruff: noqa: ARG002 - gRPC hands each a request and a context

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode.codec import dump_json, failure_to_proto
from kestrl.errors import Failure
from kestrl_judge.encoded import ReceivedRequest
from kestrl_judge.scoring import Judgement, Scorer, judge

SERVICE = pb.DESCRIPTOR.services_by_name["JudgeService"].full_name


class JudgeServicer:
    """The JudgeService. Requests are not decoded, since reward processes get their bytes."""

    def __init__(self, component: str, scorers: Sequence[Scorer]) -> None:
        self._component = component
        self._scorers = scorers

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service, as generated code does, with a reader of requests of its own."""
        score_group = grpc.unary_unary_rpc_method_handler(
            self.ScoreGroup,
            request_deserializer=ReceivedRequest.read,
            response_serializer=pb.ScoreGroupResponse.SerializeToString,
        )
        handlers = {"ScoreGroup": score_group}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)

    async def ScoreGroup(self, request: ReceivedRequest, context: Any) -> pb.ScoreGroupResponse:
        attributes = {Attr.GROUP_ID: request.group.id, Attr.SCENARIO_ID: request.group.scenario_id}
        with span(SpanName.SCORE, attributes) as current:
            judged = await judge(self._scorers, request.group, max_turns=request.max_turns)
            failed = next(
                (one_judgement.failure for one_judgement in judged.episodes if one_judgement.failure is not None), None
            )
            if failed is not None:
                current.set_attributes({Attr.FAILURE_BOUNDARY: str(failed.boundary), Attr.ERROR_TYPE: failed.code})
        return pb.ScoreGroupResponse(
            scores=[self._message(judgement) for judgement in judged.episodes],
            details_json=dump_json(judged.details) if judged.details else "",
        )

    def _message(self, judgement: Judgement) -> pb.EpisodeScore:
        return pb.EpisodeScore(
            episode_id=judgement.episode_id,
            reward=judgement.reward,
            rewards=judgement.rewards,
            reward_weights=judgement.weights,
            turn_rewards=judgement.turns,
            metrics=judgement.metrics,
            answer=judgement.answer,
            failure=None if judgement.failure is None else failure_to_proto(self._named(judgement.failure)),
            details_json=dump_json(judgement.details) if judgement.details else "",
        )

    def _named(self, failure: Failure) -> Failure:
        return Failure(
            boundary=failure.boundary,
            code=failure.code,
            message=failure.message,
            retryable=failure.retryable,
            component=failure.component or self._component,
        )
