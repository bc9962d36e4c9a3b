"""Conversion of episodes, groups and failures to protobuf messages and back. Token arrays are encoded as little-endian
bytes.
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.episode import (
    CallOutcome,
    Episode,
    Group,
    PolicyVersion,
    Row,
    Scenario,
    StopReason,
    ToolCall,
    Turn,
)
from kestrl.errors import Boundary, Failure

if sys.byteorder != "little":  # pragma: no cover - no supported machine is big-endian
    raise ImportError("KestRL's wire format is little-endian, but this machine is big-endian")

_BOUNDARIES: dict[Boundary, pb.Boundary.ValueType] = {
    member: pb.Boundary.Value(f"BOUNDARY_{member.name}") for member in Boundary
}
_BOUNDARIES_BACK = {value: member for member, value in _BOUNDARIES.items()}


dump_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Encodes a value as JSON for the wire. One shared encoder: `json.dumps` with options creates one per call."""


def _load(text: str, default: Any) -> Any:
    return json.loads(text) if text else default


def failure_to_proto(failure: Failure) -> pb.Failure:
    return pb.Failure(
        boundary=_BOUNDARIES[failure.boundary],
        code=failure.code,
        message=failure.message,
        retryable=failure.retryable,
        component=failure.component,
    )


def failure_from_proto(message: pb.Failure | bytes) -> Failure:
    if isinstance(message, bytes):
        message = pb.Failure.FromString(message)
    return Failure(
        boundary=_BOUNDARIES_BACK.get(message.boundary, Boundary.INFRASTRUCTURE),
        code=message.code,
        message=message.message,
        retryable=message.retryable,
        component=message.component,
    )


def policy_to_proto(policy: PolicyVersion | None) -> pb.PolicyVersion | None:
    return None if policy is None else pb.PolicyVersion(job=policy.job, step=policy.step, sha256=policy.sha256)


def policy_from_proto(message: pb.PolicyVersion) -> PolicyVersion | None:
    """The version, or None if the message is not set (the base model)."""
    if not message.sha256:
        return None
    return PolicyVersion(job=message.job, step=message.step, sha256=message.sha256)


def scenario_to_proto(scenario: Scenario) -> pb.Scenario:
    return pb.Scenario(
        id=scenario.id,
        ordinal=scenario.ordinal,
        messages=[pb.Message(role=message["role"], content=message["content"]) for message in scenario.messages],
        tools=scenario.tools or (),
        tools_restricted=scenario.tools is not None,
        tools_kwargs_json=dump_json(scenario.tools_kwargs),
        ground_truth_json=dump_json(scenario.ground_truth),
        metadata_json=dump_json(scenario.metadata),
        agent=scenario.agent,
    )


def scenario_from_proto(message: pb.Scenario) -> Scenario:
    return Scenario(
        id=message.id,
        ordinal=message.ordinal,
        messages=[{"role": item.role, "content": item.content} for item in message.messages],
        tools=list(message.tools) if message.tools_restricted else None,
        tools_kwargs=_load(message.tools_kwargs_json, {}),
        ground_truth=_load(message.ground_truth_json, None),
        metadata=_load(message.metadata_json, {}),
        agent=message.agent,
    )


def _row_to_proto(row: Row) -> pb.Row:
    return pb.Row(
        token_ids=row.token_ids.tobytes(), mask=row.mask, logprobs=row.logprobs.tobytes(), policies=row.policies
    )


def _row_from_proto(message: pb.Row) -> Row:
    token_ids, logprobs = array("i"), array("f")
    token_ids.frombytes(message.token_ids)
    logprobs.frombytes(message.logprobs)
    return Row(token_ids=token_ids, mask=message.mask, logprobs=logprobs, policies=list(message.policies))


def _call_to_proto(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(
        turn=call.turn,
        name=call.name,
        raw=call.raw,
        arguments_json="" if call.arguments is None else dump_json(call.arguments),
        outcome=call.outcome,
        text=call.text,
        data_json=dump_json(call.data),
        seconds=call.seconds,
    )


def _call_from_proto(message: pb.ToolCall) -> ToolCall:
    return ToolCall(
        turn=message.turn,
        name=message.name,
        raw=message.raw,
        arguments=_load(message.arguments_json, None),
        outcome=CallOutcome(message.outcome),
        text=message.text,
        data=_load(message.data_json, {}),
        seconds=message.seconds,
    )


def _turn_to_proto(turn: Turn) -> pb.Turn:
    return pb.Turn(
        index=turn.index,
        row=turn.row,
        start=turn.start,
        end=turn.end,
        text=turn.text,
        finish_reason=turn.finish_reason,
        engine=turn.engine,
        policy=turn.policy,
        seconds=turn.seconds,
        reasoning_opened=turn.reasoning_opened,
        seed=turn.seed,
    )


def _turn_from_proto(message: pb.Turn) -> Turn:
    return Turn(
        index=message.index,
        row=message.row,
        start=message.start,
        end=message.end,
        text=message.text,
        finish_reason=message.finish_reason,
        engine=message.engine,
        policy=message.policy,
        seconds=message.seconds,
        reasoning_opened=message.reasoning_opened,
        seed=message.seed,
    )


def episode_to_proto(episode: Episode) -> pb.Episode:
    return pb.Episode(
        id=episode.id,
        group_id=episode.group_id,
        scenario_id=episode.scenario_id,
        index=episode.index,
        seed=episode.seed,
        rows=[_row_to_proto(row) for row in episode.rows],
        turns=[_turn_to_proto(turn) for turn in episode.turns],
        tool_calls=[_call_to_proto(call) for call in episode.tool_calls],
        messages_json=dump_json(list(episode.messages)),
        stop_reason=episode.stop_reason,
        failure=None if episode.failure is None else failure_to_proto(episode.failure),
        policy=policy_to_proto(episode.policy),
        engine=episode.engine,
        started_at=episode.started_at,
        seconds=episode.seconds,
        trace_id=episode.trace_id,
        reward=episode.reward,
        rewards=dict(episode.rewards),
        reward_weights=dict(episode.reward_weights),
        turn_rewards=episode.turn_rewards,
        metrics=dict(episode.metrics),
        loop_reward=episode.loop_reward,
        environments_json=dump_json(episode.environments) if episode.environments else "",
        scoring_json=dump_json(episode.scoring) if episode.scoring else "",
        answer=episode.answer,
        info_json=dump_json(episode.info) if episode.info else "",
        main_row=episode.main_row,
    )


def episode_from_proto(message: pb.Episode) -> Episode:
    return Episode(
        id=message.id,
        group_id=message.group_id,
        scenario_id=message.scenario_id,
        index=message.index,
        seed=message.seed,
        rows=[_row_from_proto(row) for row in message.rows],
        turns=[_turn_from_proto(turn) for turn in message.turns],
        tool_calls=[_call_from_proto(call) for call in message.tool_calls],
        messages=_load(message.messages_json, []),
        stop_reason=StopReason(message.stop_reason),
        failure=failure_from_proto(message.failure) if message.HasField("failure") else None,
        policy=policy_from_proto(message.policy),
        engine=message.engine,
        started_at=message.started_at,
        seconds=message.seconds,
        trace_id=message.trace_id,
        reward=message.reward if message.HasField("reward") else None,
        rewards=dict(message.rewards),
        reward_weights=dict(message.reward_weights),
        turn_rewards=tuple(message.turn_rewards),
        metrics=dict(message.metrics),
        loop_reward=message.loop_reward if message.HasField("loop_reward") else None,
        environments=_load(message.environments_json, {}),
        scoring=_load(message.scoring_json, {}),
        answer=message.answer if message.HasField("answer") else None,
        info=_load(message.info_json, {}),
        main_row=message.main_row if message.HasField("main_row") else None,
    )


def group_to_proto(group: Group) -> pb.Group:
    return pb.Group(
        id=group.id,
        scenario=scenario_to_proto(group.scenario),
        episodes=[episode_to_proto(episode) for episode in group.episodes],
        tools_json=dump_json(list(group.tools)) if group.tools else "",
        scoring_json=dump_json(group.scoring) if group.scoring else "",
    )


def group_from_proto(message: pb.Group) -> Group:
    return Group(
        id=message.id,
        scenario=scenario_from_proto(message.scenario),
        episodes=[episode_from_proto(episode) for episode in message.episodes],
        tools=_load(message.tools_json, ()),
        scoring=_load(message.scoring_json, {}),
    )
