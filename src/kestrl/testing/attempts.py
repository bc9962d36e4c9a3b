"""Builds attempts for testing rewards without a model: `reward(make_attempt("72", ground_truth=72))`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl.episode import BASE_MODEL_NAME, CallOutcome, Episode, Json, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.rewards import Attempt


def make_call(
    name: str,
    arguments: Mapping[str, Json] | None = None,
    *,
    text: str = "",
    data: Mapping[str, Json] | None = None,
    outcome: CallOutcome = CallOutcome.OK,
    turn: int = 0,
) -> ToolCall:
    """A tool call.

    Args:
        name: The tool.
        arguments: What the model sent.
        text: Result for the model.
        data: Facts of the tool for rewards.
        outcome: Outcome of the call.
        turn: Turn that makes it, from 0.
    """
    return ToolCall(
        turn=turn, name=name, raw="", arguments=dict(arguments or {}), outcome=outcome, text=text, data=dict(data or {})
    )


def make_attempt(
    *turns: str,
    ground_truth: Json = None,
    metadata: Mapping[str, Json] | None = None,
    prompt: str = "?",
    calls: Sequence[ToolCall] = (),
    environments: Mapping[str, Json] | None = None,
    stop_reason: StopReason = StopReason.ANSWERED,
    loop_reward: float | None = None,
    info: Mapping[str, Json] | None = None,
    max_turns: int = 10,
) -> Attempt:
    """A finished episode with the given texts as turns, each one token long.

    Args:
        turns: Texts of the model's turns; the last is the answer.
        ground_truth: The row's.
        metadata: The row's further columns.
        prompt: The row's question.
        calls: The tool calls.
        environments: The final state of each environment.
        stop_reason: Why the episode ended.
        loop_reward: What the agent loop returned.
        info: What the run of an agent by URL reported.
        max_turns: The job's limit.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    scenario = Scenario(
        id="scenario", ordinal=0, messages=messages, ground_truth=ground_truth, metadata=dict(metadata or {})
    )
    row = Row(
        token_ids=array("i", [0, *range(1, len(turns) + 1)]),
        mask=bytes([0, *[1] * len(turns)]),
        logprobs=array("f", [0.0, *[-1.0] * len(turns)]),
        policies=[BASE_MODEL_NAME] * len(turns),
    )
    episode = Episode(
        id="group/0",
        group_id="group",
        scenario_id=scenario.id,
        index=0,
        seed=0,
        rows=[row],
        turns=[_turn(index, text) for index, text in enumerate(turns)],
        tool_calls=list(calls),
        messages=[*messages, *({"role": "assistant", "content": text} for text in turns)],
        stop_reason=stop_reason,
        failure=None,
        policy=None,
        engine="engine-0",
        started_at=0.0,
        seconds=1.0,
        loop_reward=loop_reward,
        info=dict(info or {}),
        environments=dict(environments or {}),
    )
    return Attempt(scenario=scenario, episode=episode, max_turns=max_turns)


def _turn(index: int, text: str) -> Turn:
    return Turn(
        index=index,
        row=0,
        start=index + 1,
        end=index + 2,
        text=text,
        finish_reason="stop",
        engine="engine-0",
        policy=BASE_MODEL_NAME,
        seconds=0.1,
    )
