"""Spans nest as the work does, and the engine receives the trace context."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import TraceFlags
from tests.fakes.engine import Fault

from kestrl._shared import telemetry
from kestrl._shared.telemetry.names import SpanName
from kestrl._shared.telemetry.sampling import sampler
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.errors import JudgeFailure
from kestrl_rollout.groups.scoring import Judge, outcomes


async def test_the_tree_of_a_group(stage: Any, call_text: Callable[..., str], exporter: InMemorySpanExporter) -> None:
    stage.says(call_text("search", word="a"), "Done.")
    episode = await stage.episode()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context}

    def path(span: Any) -> str:
        above = spans.get(span.parent.span_id) if span.parent else None
        name = span.name.removeprefix("kestrl.")
        return f"{path(above)} > {name}" if above else name

    assert sorted(path(span) for span in spans.values()) == [
        "group",
        "group > episode",
        "group > episode > model_call",
        "group > episode > model_call",
        "group > episode > tool_call",
        "group > score",
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {episode.trace_id}
    sent = stage.engine.prompts[0].headers["traceparent"]
    assert sent.split("-")[1] == episode.trace_id
    assert spans[int(sent.split("-")[2], 16)].name == "kestrl.model_call"
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_the_span_of_an_episode_has_its_outcome_and_ends_before_the_score(
    stage: Any, call_text: Callable[..., str], exporter: InMemorySpanExporter
) -> None:
    stage.says(call_text("search", word="a"), "Done.")
    episode = await stage.episode()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    attributes = dict(spans[SpanName.EPISODE].attributes or {})
    assert attributes["kestrl.reward"] == episode.reward
    assert attributes["kestrl.reward.distance"] == 0.0
    ended, begun = spans[SpanName.EPISODE].end_time, spans[SpanName.SCORE].start_time
    assert ended is not None
    assert begun is not None
    assert ended <= begun


def test_an_outcome_is_the_reward_with_its_distance_from_the_groups_mean_or_the_failure() -> None:
    failure = common.Failure(boundary=common.BOUNDARY_TOOL, code="tool_raised")
    episodes = [
        common.Episode(id="g/0", reward=1.0),
        common.Episode(id="g/1", reward=-0.5),
        common.Episode(id="g/2", failure=failure),
    ]
    assert outcomes(common.Group(id="g", episodes=episodes)) == {
        "g/0": {"kestrl.reward": 1.0, "kestrl.reward.distance": 0.75},
        "g/1": {"kestrl.reward": -0.5, "kestrl.reward.distance": 0.75},
        "g/2": {"kestrl.failure.boundary": "tool", "error.type": "tool_raised"},
    }
    assert outcomes(common.Group(id="g", episodes=episodes[2:])) == {
        "g/2": {"kestrl.failure.boundary": "tool", "error.type": "tool_raised"}
    }


async def test_a_failure_in_a_group_that_is_not_traced_is_counted(
    make_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics: dict[str, Callable[[], Any]] = {}
    monkeypatch.setattr("kestrl_rollout.metrics.observe", lambda metric, read: metrics.setdefault(metric.name, read))
    monkeypatch.setattr(telemetry, "_tracer", TracerProvider(sampler=sampler(0.0)).get_tracer("kestrl"))
    stage = await make_stage()
    stage.engine.script = lambda prompt: Fault(status=500)
    episode = await stage.episode()
    assert episode.trace_id == ""
    flags = stage.engine.prompts[0].headers["traceparent"].rpartition("-")[2]
    assert not int(flags, 16) & TraceFlags.SAMPLED
    assert dict(metrics["kestrl.rollout.episodes"]()) == {("failed", "engine/engine_error"): 1}


async def test_without_tracing_nothing_is_sent(stage: Any) -> None:
    stage.says("Hello.")
    episode = await stage.episode()
    assert episode.trace_id == ""
    assert "traceparent" not in stage.engine.prompts[0].headers


class Scores:
    """A connection to a judge that answers with rewards, or does not."""

    def __init__(self, *rewards: float) -> None:
        self._rewards = rewards

    async def call(self, *_: Any, **__: Any) -> pb.ScoreGroupResponse:
        if not self._rewards:
            raise JudgeFailure("it is away", code="judge_away")
        scores = [pb.EpisodeScore(episode_id=f"g/{place}", reward=reward) for place, reward in enumerate(self._rewards)]
        return pb.ScoreGroupResponse(scores=scores)


@pytest.mark.parametrize(
    ("rewards", "attributes"),
    [
        ((0.25, -1.0), {"kestrl.reward.lowest": -1.0, "kestrl.reward.highest": 0.25}),
        ((), {"kestrl.failure.boundary": "judge", "error.type": "judge_away"}),
    ],
)
async def test_a_scores_span_says_what_to_keep(
    exporter: InMemorySpanExporter, rewards: tuple[float, ...], attributes: dict[str, Any]
) -> None:
    group = common.Group(id="g", episodes=[common.Episode(id="g/0"), common.Episode(id="g/1")])
    await Judge(cast("Any", Scores(*rewards)), component="rollout-0").score(
        group, max_turns=3, ends=time.monotonic() + 9
    )
    (span,) = [span for span in exporter.get_finished_spans() if span.name == SpanName.SCORE]
    assert dict(span.attributes or {}) == {"kestrl.group.id": "g", **attributes}
