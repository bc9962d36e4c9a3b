"""A run's spans are one tree, and it hangs where the settings say."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kestrl_learner.run import LearnerRun

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_the_runs_root_span_is_a_child_of_the_given_one(staged: Any, exporter: InMemorySpanExporter) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1, traceparent=f"00-{TRACE}-{PARENT}-01")).main()
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.name == "kestrl.job"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    assert {"kestrl.step", "kestrl.publish", "kestrl.group"} <= {span.name for span in spans}
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_without_one_it_is_a_root(staged: Any, exporter: InMemorySpanExporter) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1)).main()
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "kestrl.job"]
    assert root.parent is None
