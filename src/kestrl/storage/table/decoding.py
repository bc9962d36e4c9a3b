"""Rows of the table as stored groups."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from kestrl.episode import CallOutcome, Episode, Group, PolicyVersion, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.errors import Boundary, Failure
from kestrl.storage.stored_groups import GroupOutcome, StoredGroup, TrainedTokens

Record = Mapping[str, Any]
"""A row of the table, as pyarrow gives it."""


def groups_of(records: Sequence[Record]) -> list[StoredGroup]:
    """The groups of rows in the order of their file.

    Raises:
        ValueError, KeyError, TypeError: A row is not one that the table's writer makes.
    """
    return [
        _stored(list(group_records)) for _, group_records in groupby(records, key=lambda record: record["group_index"])
    ]


def _load(text: str | None, default: Any) -> Any:
    return default if text is None else json.loads(text)


def _stored(records: Sequence[Record]) -> StoredGroup:
    first = records[0]
    episode_records = [record for record in records if record["episode"] is not None]
    return StoredGroup(
        group=Group(
            id=first["group"],
            scenario=_scenario(first),
            episodes=[_episode(record) for record in episode_records],
            tools=_load(first["tools"], ()),
            scoring=_load(first["group_scoring"], {}),
        ),
        outcome=GroupOutcome(first["outcome"]),
        attempt=first["attempt"],
        reason=first["reason"],
        failure=None if episode_records else _failure(first),
        tokens={
            record["episode"]: tokens for record in episode_records if (tokens := _tokens(record["rows"])) is not None
        },
    )


def message_of(columns: Mapping[str, str | None]) -> dict[str, Any]:
    """The message of its columns."""
    texts = {name: columns[name] for name in ("role", "content") if columns[name] is not None}
    calls = columns["tool_calls"]
    return {**texts, **({} if calls is None else {"tool_calls": json.loads(calls)}), **_load(columns["other"], {})}


def _scenario(record: Record) -> Scenario:
    return Scenario(
        id=record["scenario"],
        ordinal=record["ordinal"],
        messages=[message_of(columns) for columns in record["prompt"]],
        tools=record["scenario_tools"],
        tools_kwargs=_load(record["tools_kwargs"], {}),
        agent=record["agent"],
        ground_truth=_load(record["ground_truth"], None),
        metadata=_load(record["metadata"], {}),
    )


def _failure(record: Record) -> Failure | None:
    if record["failure_boundary"] is None:
        return None
    return Failure(
        boundary=Boundary(record["failure_boundary"]),
        code=record["failure_code"],
        message=record["failure_message"],
        retryable=record["failure_retryable"],
        component=record["failure_component"],
    )


def _named(pairs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {pair["name"]: pair["value"] for pair in pairs}


def _episode(record: Record) -> Episode:
    policy = record["policy_sha256"]
    return Episode(
        id=record["episode"],
        group_id=record["group"],
        scenario_id=record["scenario"],
        index=record["index"],
        seed=record["seed"],
        rows=[_row(columns) for columns in record["rows"]],
        turns=[Turn(**columns) for columns in record["turns"]],
        tool_calls=[_call(columns) for columns in record["tool_calls"]],
        messages=[message_of(columns) for columns in record["messages"]],
        stop_reason=StopReason(record["stop"]),
        failure=_failure(record),
        policy=None
        if policy is None
        else PolicyVersion(job=record["policy_job"], step=record["policy_step"], sha256=policy),
        engine=record["engine"],
        started_at=record["started_at"],
        seconds=record["duration_s"],
        trace_id=record["trace_id"],
        reward=record["reward"],
        rewards=_named(record["rewards"]),
        reward_weights=_named(record["reward_weights"]),
        turn_rewards=tuple(record["turn_rewards"]),
        metrics=_named(record["metrics"]),
        loop_reward=record["loop_reward"],
        answer=record["answer"],
        environments=_load(record["environments"], {}),
        info=_load(record["info"], {}),
        scoring=_load(record["scoring"], {}),
        main_row=record["main_row"],
    )


def _row(columns: Record) -> Row:
    return Row(
        token_ids=array("i", columns["token_ids"]),
        mask=bytes(columns["mask"]),
        logprobs=array("f", columns["logprobs"]),
        policies=columns["policies"],
    )


def _call(columns: Record) -> ToolCall:
    return ToolCall(
        turn=columns["turn"],
        name=columns["name"],
        raw=columns["raw"],
        arguments=_load(columns["arguments"], None),
        outcome=CallOutcome(columns["outcome"]),
        text=columns["text"],
        data=_load(columns["data"], {}),
        seconds=columns["seconds"],
    )


def _tokens(rows: Sequence[Record]) -> TrainedTokens | None:
    """What training computed on the sampled tokens of rows; None if they were not trained on."""
    if not rows or any(row["advantages"] is None for row in rows):
        return None
    sampled = [(row, place) for row in rows for place, on in enumerate(row["mask"]) if on]
    return TrainedTokens(
        advantages=array("f", [row["advantages"][place] for row, place in sampled]),
        learner_logprobs=array("f", [row["learner_logprobs"][place] for row, place in sampled]),
    )
