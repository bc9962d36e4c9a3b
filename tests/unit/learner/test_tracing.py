"""A run's spans are one tree, which hangs where the settings say, and each of its groups is a trace of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kestrl._shared.telemetry import current_trace_id
from kestrl.api.rollout.v1 import rollout_pb2 as rpb
from kestrl.episode import Group
from kestrl_learner.run import LearnerRun

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_the_runs_root_span_is_a_child_of_the_given_one(staged: Any, exporter: InMemorySpanExporter) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1, traceparent=f"00-{TRACE}-{PARENT}-01")).main()
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.name == "kestrl.job"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    of_run = [span for span in spans if span.name != "kestrl.group"]
    assert {f"{span.context.trace_id:032x}" for span in of_run if span.context} == {TRACE}
    assert {"kestrl.step", "kestrl.publish", "kestrl.group"} <= {span.name for span in spans}
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_without_one_it_is_a_root(staged: Any, exporter: InMemorySpanExporter) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1)).main()
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "kestrl.job"]
    assert root.parent is None


def traced(request: rpb.RunGroupRequest, group: Group) -> Group:
    """A group whose first episode is traced, as a worker says it, and the others are not."""
    del request
    first, *others = group.episodes
    return replace(group, episodes=[replace(first, trace_id=current_trace_id()), *others])


async def test_a_group_is_a_trace_and_the_advantages_of_its_step_are_in_it(
    staged: Any, exporter: InMemorySpanExporter
) -> None:
    async with staged() as stage:
        for worker in stage.workers:
            worker.script = traced
        await LearnerRun(stage.but(max_steps=1)).main()
        stored = stage.stored(1)
    spans = exporter.get_finished_spans()
    groups = {span.context.trace_id: span for span in spans if span.name == "kestrl.group" and span.context}
    (job,) = [span for span in spans if span.name == "kestrl.job"]
    assert job.context is not None
    assert job.context.trace_id not in groups
    assert all(span.parent is None for span in groups.values())
    assert {link.context.trace_id for span in groups.values() for link in span.links} == {job.context.trace_id}
    seen: dict[str, dict[str, Any]] = {}
    for span in (span for span in spans if span.name == "kestrl.advantage"):
        facts: dict[str, Any] = dict(span.attributes or {})
        assert span.parent is not None
        group = groups[span.parent.trace_id]
        assert group.context is not None
        assert span.parent.span_id == group.context.span_id
        assert facts["kestrl.episode.id"] == f"{(group.attributes or {})['kestrl.group.id']}/0"
        seen[facts.pop("kestrl.episode.id")] = facts
    firsts = [(group.tokens[group.group.episodes[0].id], group.group.episodes[0]) for group in stored if group.tokens]
    assert seen == {
        episode.id: {
            "kestrl.step": 1,
            "kestrl.reward": episode.reward,
            "kestrl.advantage": max(abs(advantage) for advantage in tokens.advantages),
        }
        for tokens, episode in firsts
    }
    assert any(facts["kestrl.advantage"] > 0.0 for facts in seen.values())
