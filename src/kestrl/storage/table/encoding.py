"""Stored groups as an Arrow table with one row an episode. The arrays of tokens are not copied value by value."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from kestrl.episode import Episode, Group, Row, Scenario, ToolCall, Turn
from kestrl.episode.codec import dump_json
from kestrl.errors import Failure
from kestrl.storage.stored_groups import EpisodeBatch, StoredGroup, TrainedTokens
from kestrl.storage.table.arrow import arrow, arrow_type, schema
from kestrl.storage.table.columns import COLUMNS, KINDS

TURN_FIELDS = tuple(KINDS["turns"][0])  # type: ignore[index]


def table_of(batch: EpisodeBatch, run: str) -> Any:
    """The Arrow table of a batch.

    Args:
        batch: The batch.
        run: Id of the run.
    """
    pa = arrow()
    places = [
        (number, stored, episode)
        for number, stored in enumerate(batch.stored)
        for episode in stored.group.episodes or (None,)
    ]
    firsts = {id(stored): episode for _, stored, episode in reversed(places)}
    records = [
        {
            "run": run,
            "step": batch.step,
            "purpose": batch.purpose,
            "group_index": number,
            **_group_columns(stored, with_scoring=firsts[id(stored)] is episode),
            **_scenario_columns(stored.group.scenario),
            **({} if episode is None else _episode_columns(episode, stored)),
            **_failure_columns(stored.failure if episode is None else episode.failure),
        }
        for number, stored, episode in places
    ]
    arrays = [
        _rows_array([(episode, stored) for _, stored, episode in places])
        if column.name == "rows"
        else pa.array([record.get(column.name) for record in records], arrow_type(column.kind))
        for column in COLUMNS
    ]
    return pa.Table.from_arrays(arrays, schema=schema())


def _json(value: Any) -> str | None:
    return dump_json(value) if value else None


def message_columns(message: Mapping[str, Any]) -> dict[str, str | None]:
    """A message with its text in columns of their own, and everything else as JSON."""
    texts = {name: message[name] for name in ("role", "content") if isinstance(message.get(name), str)}
    calls = message.get("tool_calls")
    further = {
        name: content for name, content in message.items() if name not in texts and (name != "tool_calls" or not calls)
    }
    return {
        "role": texts.get("role"),
        "content": texts.get("content"),
        "tool_calls": dump_json(calls) if calls else None,
        "other": dump_json(further) if further else None,
    }


def _named(numbers: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "value": number} for name, number in sorted(numbers.items())]


def _group_columns(stored: StoredGroup, *, with_scoring: bool) -> dict[str, Any]:
    group: Group = stored.group
    return {
        "group": group.id,
        "outcome": stored.outcome,
        "attempt": stored.attempt,
        "reason": stored.reason,
        "tools": _json(list(group.tools)),
        "group_scoring": _json(group.scoring) if with_scoring else None,
    }


def _scenario_columns(scenario: Scenario) -> dict[str, Any]:
    return {
        "scenario": scenario.id,
        "ordinal": scenario.ordinal,
        "prompt": [message_columns(message) for message in scenario.messages],
        "scenario_tools": None if scenario.tools is None else list(scenario.tools),
        "tools_kwargs": _json(scenario.tools_kwargs),
        "agent": scenario.agent,
        "ground_truth": dump_json(scenario.ground_truth),
        "metadata": _json(scenario.metadata),
    }


def _failure_columns(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {}
    return {
        "failure_boundary": failure.boundary,
        "failure_code": failure.code,
        "failure_message": failure.message,
        "failure_retryable": failure.retryable,
        "failure_component": failure.component,
    }


def _episode_columns(episode: Episode, stored: StoredGroup) -> dict[str, Any]:
    policy, tokens = episode.policy, stored.tokens.get(episode.id)
    return {
        "episode": episode.id,
        "index": episode.index,
        "seed": episode.seed,
        "reward": episode.reward,
        "advantage": None if tokens is None or not tokens.advantages else _mean(tokens.advantages),
        "stop": episode.stop_reason,
        "num_turns": episode.num_turns,
        "num_tool_calls": len(episode.tool_calls),
        "sampled_tokens": episode.sampled_tokens,
        "policy": None if policy is None else policy.name,
        "policy_job": None if policy is None else policy.job,
        "policy_step": None if policy is None else policy.step,
        "policy_sha256": None if policy is None else policy.sha256,
        "engine": episode.engine,
        "duration_s": episode.seconds,
        "started_at": episode.started_at,
        "messages": [message_columns(message) for message in episode.messages],
        "rewards": _named(episode.rewards),
        "metrics": _named(episode.metrics),
        "reward_weights": _named(episode.reward_weights),
        "turn_rewards": list(episode.turn_rewards),
        "loop_reward": episode.loop_reward,
        "answer": episode.answer,
        "main_row": episode.main_row,
        "environments": _json(episode.environments),
        "info": _json(episode.info),
        "scoring": _json(episode.scoring),
        "trace_id": episode.trace_id,
        "turns": [_turn(turn) for turn in episode.turns],
        "tool_calls": [_call(call) for call in episode.tool_calls],
    }


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _turn(turn: Turn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in TURN_FIELDS}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "turn": call.turn,
        "name": call.name,
        "raw": call.raw,
        "arguments": None if call.arguments is None else dump_json(call.arguments),
        "outcome": call.outcome,
        "text": call.text,
        "data": _json(call.data),
        "seconds": call.seconds,
    }


def _rows_array(places: Sequence[tuple[Episode | None, StoredGroup]]) -> Any:
    """The column `rows`, from the buffers of the episodes' arrays."""
    pa = arrow()
    rows: list[Row] = []
    learner: list[array[float] | None] = []
    advantages: list[array[float] | None] = []
    counts: list[int | None] = []
    for episode, stored in places:
        counts.append(None if episode is None else len(episode.rows))
        if episode is not None:
            tokens = stored.tokens.get(episode.id)
            rows += episode.rows
            for logprobs, row_advantages in _spread(episode.rows, tokens):
                learner.append(logprobs)
                advantages.append(row_advantages)
    fields = KINDS["rows"][0]  # type: ignore[index]
    columns = [
        _lists([row.token_ids for row in rows], pa.int32()),
        _lists([row.mask for row in rows], pa.uint8()),
        _lists([row.logprobs for row in rows], pa.float32()),
        _lists(learner, pa.float32()),
        _lists(advantages, pa.float32()),
        pa.array([list(row.policies) for row in rows], pa.list_(pa.string())),
    ]
    structs = pa.StructArray.from_arrays(columns, fields=list(arrow_type(fields)))
    return pa.ListArray.from_arrays(_offsets(counts), structs, type=arrow_type(KINDS["rows"]))


def _spread(
    rows: Sequence[Row], tokens: TrainedTokens | None
) -> Iterator[tuple[array[float], array[float]] | tuple[None, None]]:
    """Learner's log-probs and advantages of each row, 0 where the mask is; None of an episode that was not trained on.

    Raises:
        ValueError: There is another number of them than of sampled tokens.
    """
    if tokens is None:
        yield from ((None, None) for _ in rows)
        return
    places = [(number, place) for number, row in enumerate(rows) for place, on in enumerate(row.mask) if on]
    spread = [(array("f", bytes(4 * len(row.mask))), array("f", bytes(4 * len(row.mask)))) for row in rows]
    for (number, place), logprob, advantage in zip(places, tokens.learner_logprobs, tokens.advantages, strict=True):
        spread[number][0][place], spread[number][1][place] = logprob, advantage
    yield from spread


def _offsets(counts: Sequence[int | None]) -> Any:
    """Offsets of lists of these lengths; a null offset makes the list null."""
    pa = arrow()
    ends = [0, *accumulate(count or 0 for count in counts)]
    nulls = [None if count is None else end for count, end in zip(counts, ends[:-1], strict=True)]
    return pa.array([*nulls, ends[-1]], pa.int32())


def _lists(values: Sequence[array[Any] | bytes | None], kind: Any) -> Any:
    """A column of lists of numbers, joined as bytes."""
    pa = arrow()
    content = b"".join(memoryview(sequence).cast("B") for sequence in values if sequence is not None)
    size = kind.bit_width // 8
    numbers = pa.Array.from_buffers(kind, len(content) // size, [None, pa.py_buffer(content)])
    offsets = _offsets([None if sequence is None else len(sequence) for sequence in values])
    return pa.ListArray.from_arrays(offsets, numbers)
