"""Spans of the SDK: what they record, which groups are sampled, and that they reach a collector by either protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags
from tests.fakes.collector import Collector, collecting

import kestrl._shared.telemetry
from kestrl._shared.telemetry import Unended, current_trace_id, ids_of, span, trace_headers, within
from kestrl._shared.telemetry.export import RootIds
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl._shared.telemetry.sampling import sampler
from kestrl.engines.otlp import is_http, uses_http
from kestrl.errors import EngineFailure, UserInputError

SAMPLED = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
UNSAMPLED = SpanContext(7, 9, is_remote=True)
GROUPS = 2_000


@contextmanager
def beneath(parent: SpanContext) -> Generator[None]:
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(parent)))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def sampling(ratio: float) -> Generator[InMemorySpanExporter]:
    """A process that samples this share of groups."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler(ratio), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kestrl._shared.telemetry, "_tracer", provider.get_tracer("kestrl"))
        yield exporter


def test_a_span_has_its_parent_and_is_passed_on(exporter: InMemorySpanExporter) -> None:
    with span("root"), span("child", {"turn": 1}):
        headers = trace_headers()
    inner, outer = exporter.get_finished_spans()
    assert (inner.name, outer.name) == ("child", "root")
    assert inner.parent == outer.context
    assert inner.context is not None
    assert headers["traceparent"].split("-")[1:3] == [f"{inner.context.trace_id:032x}", f"{inner.context.span_id:016x}"]


def test_a_failure_marks_its_span(exporter: InMemorySpanExporter) -> None:
    with beneath(SAMPLED), pytest.raises(EngineFailure), span("kestrl.model_call"):
        raise EngineFailure("engine-0: gone", code="unreachable")
    (kept,) = exporter.get_finished_spans()
    assert dict(kept.attributes or {}) == {"kestrl.failure.boundary": "engine", "error.type": "unreachable"}
    assert (kept.status.status_code, kept.status.description) == (StatusCode.ERROR, "engine-0: gone")


def test_a_span_that_waits_for_its_outcome_ends_with_its_work_whatever_comes(exporter: InMemorySpanExporter) -> None:
    with suppress(EngineFailure), span("group"), Unended() as unended:
        with span("episode", unended=unended, key="g/0"):
            pass
        with span("score"):
            assert [kept.name for kept in exporter.get_finished_spans()] == []
        unended.set("g/0", {"kestrl.reward": 0.5})
        raise EngineFailure("engine-0: gone", code="unreachable")
    score, episode, group = exporter.get_finished_spans()
    assert (score.name, episode.name, group.name) == ("score", "episode", "group")
    assert dict(episode.attributes or {}) == {"kestrl.reward": 0.5}
    assert episode.parent == group.context
    assert episode.end_time is not None
    assert score.start_time is not None
    assert episode.end_time <= score.start_time


def test_a_span_that_is_not_sampled_waits_for_nothing() -> None:
    with beneath(UNSAMPLED), Unended() as unended:
        with span("episode", unended=unended, key="g/0"):
            pass
        assert not unended.recorded


def test_a_trace_of_its_own_has_derived_ids_and_a_link_to_what_began_it() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=RootIds(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kestrl._shared.telemetry, "_tracer", provider.get_tracer("kestrl"))
        with span("job"), span("group", root=ids_of("run/0-1-0")), span("episode"):
            assert current_trace_id() == ids_of("run/0-1-0").split("-")[1]
        with within(ids_of("run/0-1-0")), span("advantage"):
            pass
        with span("other", root=ids_of("run/0-2-0")):
            pass
    episode, group, job, advantage, other = exporter.get_finished_spans()
    assert [kept.name for kept in (episode, group, job, advantage, other)] == [
        "episode", "group", "job", "advantage", "other",
    ]  # fmt: skip
    assert (group.parent, other.parent) == (None, None)
    assert [link.context for link in group.links] == [job.context]
    assert not other.links
    assert episode.parent == group.context
    assert advantage.parent is not None
    assert group.context is not None
    assert (advantage.parent.trace_id, advantage.parent.span_id) == (group.context.trace_id, group.context.span_id)
    traces = {kept.context.trace_id for kept in (job, group, other) if kept.context}
    assert len(traces) == 3


def test_the_children_of_an_unsampled_parent_are_not_recorded(exporter: InMemorySpanExporter) -> None:
    with beneath(UNSAMPLED), span("kestrl.model_call") as made:
        assert not made.is_recording()
        assert trace_headers()["traceparent"].endswith("-00")
        assert current_trace_id() == ""
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_groups_is_sampled_whole(ratio: float) -> None:
    with sampling(ratio) as exporter, span(SpanName.STEP):
        for number in range(GROUPS):
            with span(SpanName.GROUP, {Attr.GROUP_ID: f"job/{number}"}), span(SpanName.EPISODE):
                pass
    names = [each.name for each in exporter.get_finished_spans()]
    assert names.count(SpanName.GROUP) == names.count(SpanName.EPISODE) == pytest.approx(ratio * GROUPS, abs=50)
    assert names.count(SpanName.STEP) == 1


def sampled_groups(parent: SpanContext | None) -> set[str]:
    with sampling(0.1) as exporter:
        for number in range(GROUPS):
            with beneath(parent or trace.INVALID_SPAN_CONTEXT), span(SpanName.GROUP, {Attr.GROUP_ID: f"job/{number}"}):
                pass
    return {str((each.attributes or {})[Attr.GROUP_ID]) for each in exporter.get_finished_spans()}


def test_a_group_is_sampled_by_its_id_and_by_its_caller() -> None:
    local = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    assert sampled_groups(None) == sampled_groups(local)
    assert len(sampled_groups(SAMPLED)) == GROUPS
    assert sampled_groups(UNSAMPLED) == set()


EXPORTING = """
from kestrl._shared.telemetry import set_up, span
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
set_up("rollout-0", job="j", run="r", endpoint={endpoint!r}, traced_groups={ratio}, metrics_listen="127.0.0.1:0")
observe(Metric.TURNS, lambda: 3)
with span("kestrl.step"):
    for number in range(20):
        with span("kestrl.group", {{"kestrl.group.id": str(number)}}):
            pass
"""


def exported(endpoint: str | None, ratio: float = 1.0, **environment: str) -> None:
    """A process that exports to an endpoint, to its end."""
    code = EXPORTING.format(endpoint=endpoint, ratio=ratio)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def names(collector: Collector) -> list[str]:
    assert {each.service for each in collector.spans.values()} == {"kestrl-rollout"}
    return sorted({each.name for each in collector.spans.values()})


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_and_metrics_reach_a_collector(protocol: str) -> None:
    with collecting() as collector:
        exported(collector.endpoint if protocol == "grpc" else collector.http_endpoint)
    assert names(collector) == ["kestrl.group", "kestrl.step"]
    assert set(collector.metrics) == {"kestrl-rollout"}
    with collecting() as collector:
        exported(collector.endpoint if protocol == "grpc" else collector.http_endpoint, 0.0)
    assert names(collector) == ["kestrl.step"]


ROTATING = """
from pathlib import Path
from opentelemetry import metrics, trace
from kestrl._shared.telemetry import set_up, span
set_up("rollout-0", job="j", run="r", endpoint={endpoint!r}, metrics_listen="127.0.0.1:0")
for key in ("first", "second"):
    Path({file!r}).write_text(f"Authorization=Bearer%20{{key}}")
    with span("kestrl.step"):
        pass
    assert trace.get_tracer_provider().force_flush()
    assert metrics.get_meter_provider().force_flush()
"""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_headers_of_a_file_are_read_anew_for_each_export(protocol: str, tmp_path: Path) -> None:
    """Without another exporter for as long as they stay."""
    file = tmp_path / "headers"
    file.write_text("Authorization=Bearer%20first")
    with collecting() as collector:
        endpoint = collector.endpoint if protocol == "grpc" else collector.http_endpoint
        code = ROTATING.format(endpoint=endpoint, file=str(file))
        environment = {"KESTRL_OTLP_HEADERS_FILE": str(file)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
    assert len(collector.spans) == 2
    assert list(dict.fromkeys(collector.credentials)) == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_standard_variable_has_the_headers(protocol: str) -> None:
    with collecting() as collector:
        endpoint = collector.endpoint if protocol == "grpc" else collector.http_endpoint
        exported(endpoint, 1.0, OTEL_EXPORTER_OTLP_HEADERS="Authorization=Bearer%20key")
    assert set(collector.credentials) == {"Bearer key"}


def test_a_file_of_headers_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KESTRL_OTLP_HEADERS_FILE", str(tmp_path / "none"))
    with pytest.raises(UserInputError, match=r"KESTRL_OTLP_HEADERS_FILE: .*none cannot be read"):
        kestrl._shared.telemetry.set_up("rollout-0", job="j", run="r", endpoint="http://127.0.0.1:4318")


def test_the_standard_variables_name_endpoint_and_sampler() -> None:
    with collecting() as collector:
        exported(None, 0.0, OTEL_EXPORTER_OTLP_ENDPOINT=collector.http_endpoint, OTEL_TRACES_SAMPLER="always_on")
    assert names(collector) == ["kestrl.group", "kestrl.step"]


@pytest.mark.parametrize(
    ("endpoint", "http"),
    [
        ("http://127.0.0.1:4317", False),
        ("http://127.0.0.1:4318", True),
        ("https://collector.example", False),
        ("https://collector.example/", False),
        ("https://collector.example/otlp", True),
    ],
)
def test_the_protocol_follows_from_the_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str, http: bool) -> None:
    assert is_http(endpoint) is uses_http(endpoint, "traces") is http
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if http else "http/protobuf")
    assert uses_http(endpoint, "metrics") is not http
