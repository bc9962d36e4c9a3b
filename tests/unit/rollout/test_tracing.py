"""Spans nest as the work does, and the engine receives the trace context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import TraceFlags
from tests.fakes.engine import Fault

from kestrl._shared import telemetry
from kestrl._shared.telemetry.sampling import sampler


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
