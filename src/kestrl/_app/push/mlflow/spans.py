"""Episodes as spans of OTLP with MLflow's attributes: an episode, its turns, their tool calls, and the score. Pure.

Ids follow from the run and the episode, so that sending an episode again replaces its spans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kestrl.episode import BASE_MODEL_NAME, CallOutcome, Episode, ToolCall, Turn
from kestrl.errors import encodable
from kestrl.storage.episodes import StoredEpisode

INPUTS, OUTPUTS, TYPE = "mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.spanType"
USAGE, MODEL, SESSION, TAG = "mlflow.chat.tokenUsage", "mlflow.llm.model", "session.id", "mlflow.traceTag."
LONGEST_TAG = 250
SECOND = 1_000_000_000
FAILED_CALLS = frozenset(CallOutcome) - {CallOutcome.OK}


def trace_id(run: str, episode: str) -> str:
    """Id of the trace of an episode, 32 hex digits."""
    return hashlib.sha256(f"{run}\n{episode}".encode("utf-8", "replace")).hexdigest()[:32]


def spans_of(stored: StoredEpisode, run: str) -> Sequence[Span]:
    """The spans of an episode, the root first.

    Args:
        stored: The episode and where it is stored.
        run: Identity of the run, of which the ids of spans are made.
    """
    trace = _Trace(stored.episode, trace_id(run, stored.episode.id))
    return [trace.root(stored), *trace.turns(), *trace.score(stored)]


class _Trace:
    """The spans of one episode. What is stored of turns and calls is how long they took: they follow one another."""

    def __init__(self, episode: Episode, identity: str) -> None:
        self._episode, self._identity = episode, identity
        self._begin = max(0, int(episode.started_at * SECOND))
        self._end = self._begin + max(0, int(episode.seconds * SECOND))

    def _span(
        self, name: str, kind: str, begin: int, end: int, attributes: Mapping[str, Any], *, parent: str | None = "root"
    ) -> Span:
        typed_attributes = {TYPE: kind, **attributes}
        return Span(
            trace_id=bytes.fromhex(self._identity),
            span_id=self._span_id(name),
            parent_span_id=b"" if parent is None else self._span_id(parent),
            name="episode" if parent is None else encodable(name.partition("#")[0]),
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=min(begin, self._end),
            end_time_unix_nano=min(end, self._end),
            attributes=[
                KeyValue(key=key, value=_any(content))
                for key, content in typed_attributes.items()
                if content is not None
            ],
        )

    def _span_id(self, name: str) -> bytes:
        return hashlib.sha256(f"{self._identity}\n{name}".encode("utf-8", "replace")).digest()[:8]

    def root(self, stored: StoredEpisode) -> Span:
        """The span of the episode."""
        episode, prompt = self._episode, len(stored.group.scenario.messages)
        facts = _facts(stored)
        attributes: dict[str, Any] = {
            INPUTS: _json({"messages": list(episode.messages[:prompt] or stored.group.scenario.messages)}),
            OUTPUTS: _json({"messages": list(episode.messages[prompt:]), "reward": episode.reward}),
            SESSION: encodable(episode.group_id),
            **{f"kestrl.{name}": content for name, content in facts.items()},
            **{f"{TAG}kestrl.{name}": str(content)[:LONGEST_TAG] for name, content in facts.items()},
            f"{TAG}mlflow.traceName": encodable(f"step {stored.step} {episode.scenario_id}")[:LONGEST_TAG],
            "kestrl.rows": _json(list(_rows(stored))),
            "kestrl.metrics": _json(dict(episode.metrics)),
        }
        root = self._span("root", "AGENT", self._begin, self._end, attributes, parent=None)
        failure = episode.failure
        code = Status.STATUS_CODE_OK if failure is None else Status.STATUS_CODE_ERROR
        root.status.CopyFrom(Status(code=code, message="" if failure is None else encodable(str(failure))))
        return root

    def turns(self) -> Iterator[Span]:
        """The spans of turns, each followed by those of its tool calls."""
        clock = self._begin
        for turn in self._episode.turns:
            calls = [call for call in self._episode.tool_calls if call.turn == turn.index]
            answered = clock + int(turn.seconds * SECOND)
            name = f"turn {turn.index}"
            yield self._span(name, "CHAT_MODEL", clock, answered, self._turn(turn, calls))
            clock = answered
            for number, call in enumerate(calls):
                call_end = clock + int(call.seconds * SECOND)
                yield self._call(call, f"{call.name or 'malformed call'}#{turn.index}.{number}", clock, call_end)
                clock = call_end

    def _turn(self, turn: Turn, calls: Sequence[ToolCall]) -> Mapping[str, Any]:
        row = self._episode.rows[turn.row] if turn.row < len(self._episode.rows) else None
        ids = [] if row is None else list(row.token_ids[turn.start : turn.end])
        policy = turn.policy or BASE_MODEL_NAME
        usage = {"input_tokens": turn.start, "output_tokens": len(ids), "total_tokens": turn.start + len(ids)}
        called = [{"name": call.name, "arguments": call.arguments, "outcome": str(call.outcome)} for call in calls]
        return {
            OUTPUTS: _json({"text": turn.text, "tool_calls": called}),
            USAGE: _json(usage),
            MODEL: encodable(policy),
            "kestrl.turn": turn.index,
            "kestrl.engine": encodable(turn.engine),
            "kestrl.policy.version": encodable(policy),
            "kestrl.finish_reason": encodable(turn.finish_reason),
            "kestrl.seed": turn.seed,
            "kestrl.token_ids": _json(ids),
        }

    def _call(self, call: ToolCall, name: str, begin: int, end: int) -> Span:
        attributes = {
            INPUTS: _json(call.raw if call.arguments is None else dict(call.arguments)),
            OUTPUTS: _json(call.text),
            "kestrl.tool.outcome": str(call.outcome),
            "kestrl.tool.data": _json(dict(call.data)) if call.data else None,
        }
        span = self._span(name, "TOOL", begin, end, attributes, parent=f"turn {call.turn}")
        failed = call.outcome in FAILED_CALLS
        code = Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_OK
        span.status.CopyFrom(Status(code=code, message=str(call.outcome) if failed else ""))
        return span

    def score(self, stored: StoredEpisode) -> Iterator[Span]:
        """The span of the reward and its parts; none of an episode that was not scored."""
        episode = self._episode
        if episode.reward is None:
            return
        parts = {"reward": episode.reward, "rewards": dict(episode.rewards), "weights": dict(episode.reward_weights)}
        scored = {**parts, "turn_rewards": list(episode.turn_rewards), "scoring": dict(episode.scoring)}
        inputs = {"answer": episode.answer, "ground_truth": stored.group.scenario.ground_truth}
        attributes = {INPUTS: _json(inputs), OUTPUTS: _json(scored)}
        yield self._span("score", "EVALUATOR", self._end, self._end, attributes)


def _facts(stored: StoredEpisode) -> dict[str, str | int | float]:
    """What tags and attributes say of an episode; without what is not known."""
    episode, failure = stored.episode, stored.episode.failure
    facts: dict[str, str | int | float | None] = {
        "episode.id": encodable(episode.id),
        "group.id": encodable(episode.group_id),
        "scenario.id": encodable(episode.scenario_id),
        "step": stored.step,
        "purpose": str(stored.purpose),
        "outcome": str(stored.stored.outcome),
        "attempt": stored.stored.attempt,
        "stop_reason": str(episode.stop_reason),
        "reward": episode.reward,
        "policy.version": BASE_MODEL_NAME if episode.policy is None else episode.policy.name,
        "engine": encodable(episode.engine) or None,
        "failure.boundary": None if failure is None else str(failure.boundary),
        "failure.code": None if failure is None else encodable(failure.code),
        "trace_id": episode.trace_id or None,
        "reason": encodable(stored.stored.reason) or None,
    }
    parts = {f"reward.{encodable(name)}": number for name, number in episode.rewards.items()}
    return {name: content for name, content in {**facts, **parts}.items() if content is not None}


def _rows(stored: StoredEpisode) -> Iterator[dict[str, Any]]:
    """The token sequences of an episode, with what training computed on the sampled tokens."""
    tokens, at = stored.stored.tokens.get(stored.episode.id), 0
    for row in stored.episode.rows:
        record: dict[str, Any] = {
            "token_ids": list(row.token_ids),
            "response_mask": list(row.mask),
            "logprobs": [round(number, 6) for number in row.logprobs],
            "policies": list(row.policies),
        }
        if tokens is not None:
            count = sum(row.mask)
            record["advantages"] = [round(number, 6) for number in tokens.advantages[at : at + count]]
            record["learner_logprobs"] = [round(number, 6) for number in tokens.learner_logprobs[at : at + count]]
            at += count
        yield record


def _json(content: Any) -> str:
    return encodable(json.dumps(content, ensure_ascii=False, default=str))


def _any(content: str | int | float) -> AnyValue:
    if isinstance(content, str):
        return AnyValue(string_value=content)
    if isinstance(content, int):
        return AnyValue(int_value=content)
    return AnyValue(double_value=content)
