"""Spans that have a parent are ours; on the wire they are what the SDK's would be."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2 as opb
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue
from tests.fakes.collector import collecting

import kestrl.telemetry
from kestrl.episode import StopReason
from kestrl.errors import EngineFailure
from kestrl.telemetry import export, span, trace_headers
from kestrl.telemetry.child_spans import Pipeline
from kestrl.telemetry.encoding import Exporter, encode

PARENT = SpanContext(
    7, 9, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED), trace_state=TraceState([("a", "b")])
)
SIXTH_OF_MARCH = 1_772_755_200_000_000_000


class Both:
    """The SDK's tracer and our children, with one exporter."""

    def __init__(self) -> None:
        self.kept = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.kept)
        resource = Resource.create({"service.name": "kestrl-rollout"})
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self.sdk = self.provider.get_tracer("kestrl")
        self.ours = Pipeline(RandomIdGenerator(), processor, resource, InstrumentationScope("kestrl", ""))

    def sent(self) -> list[opb.ResourceSpans]:
        """One message a span, without what no two spans share."""
        messages = [encode_spans([each]).resource_spans[0] for each in self.kept.get_finished_spans()]
        for message in messages:
            (span,) = message.scope_spans[0].spans
            assert len(span.span_id) == 8
            assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
            for each in span.events:
                assert span.start_time_unix_nano <= each.time_unix_nano
                each.time_unix_nano = 0
            span.attributes.sort(key=lambda attribute: attribute.key)  # the SDK's are in the order of their last change
            span.span_id, span.start_time_unix_nano, span.end_time_unix_nano = b"", 0, 0
        return messages


@contextmanager
def beneath(parent: SpanContext) -> Generator[None]:
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(parent)))
    try:
        yield
    finally:
        context.detach(token)


@pytest.fixture
def both() -> Both:
    return Both()


@pytest.fixture
def exported(both: Both, monkeypatch: pytest.MonkeyPatch) -> Both:
    """As in a process that exports."""
    monkeypatch.setattr(kestrl.telemetry, "_pipeline", both.ours)
    monkeypatch.setattr(kestrl.telemetry, "_tracer", both.sdk)
    return both


def nothing(made: Span) -> None:
    del made


def everything(made: Span) -> None:
    made.set_attribute("one", 1)
    made.set_attributes({"two": 2.5, "many": ("a", "b"), "true": True, "name": "again"})
    made.add_event("seen", {"what": "a kestrel"})
    made.update_name("another")
    made.set_status(Status(StatusCode.ERROR, "it broke"))


def status_by_code(made: Span) -> None:
    made.set_status(StatusCode.ERROR, "it broke")


def after_its_end(made: Span) -> None:
    made.end()
    made.set_attribute("late", 1)
    made.set_attributes({"later": 2})
    made.add_event("latest")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("does", [nothing, everything, status_by_code, after_its_end])
@pytest.mark.parametrize("attributes", [None, {"name": "n", "turn": 3}])
def test_an_exported_child_span_equals_the_sdks(
    both: Both, does: Callable[[Span], None], attributes: dict[str, Any] | None
) -> None:
    with beneath(PARENT):
        made = (both.sdk.start_span("n", attributes=attributes), both.ours.child("n", PARENT, attributes))
    for each in made:
        assert each.is_recording()
        does(each)
        each.end()
        each.end()
        assert not each.is_recording()
    theirs, ours = both.sent()
    assert ours == theirs


def test_an_exception_is_an_event_with_its_type_and_message(both: Both) -> None:
    made = both.ours.child("n", PARENT, None)
    made.record_exception(ValueError("no"), {"more": 1})
    made.end(SIXTH_OF_MARCH)
    (kept,) = both.kept.get_finished_spans()
    assert kept.end_time == SIXTH_OF_MARCH
    (event,) = kept.events
    assert event.name == "exception"
    assert dict(event.attributes or {}) == {
        "exception.type": "ValueError",
        "exception.message": "no",
        "exception.escaped": "False",
        "more": 1,
    }


def test_children_of_a_parent_are_child_spans_with_its_id(exported: Both) -> None:
    with span("root") as root, span("child", {"turn": 1}) as child:
        headers = trace_headers()
    assert type(root).__module__.startswith("opentelemetry.sdk")
    assert type(child).__module__ == "kestrl.telemetry.child_spans"
    inner, outer = exported.kept.get_finished_spans()
    assert (inner.name, outer.name) == ("child", "root")
    assert inner.parent == outer.context
    assert inner.context is not None
    assert headers["traceparent"].split("-")[1:3] == [f"{inner.context.trace_id:032x}", f"{inner.context.span_id:016x}"]


def test_a_failure_marks_its_span(exported: Both) -> None:
    with beneath(PARENT), pytest.raises(EngineFailure), span("kestrl.model_call"):
        raise EngineFailure("engine-0: gone", code="unreachable")
    (kept,) = exported.kept.get_finished_spans()
    assert dict(kept.attributes or {}) == {"kestrl.failure.boundary": "engine", "error.type": "unreachable"}
    assert (kept.status.status_code, kept.status.description) == (StatusCode.ERROR, "engine-0: gone")


LOCAL = SpanContext(7, 11, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
REMOTE = SpanContext(8, 12, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
VALUES: dict[str, AttributeValue] = {
    "text": "a kestrel \N{EAGLE}",
    "empty": "",
    "enum": StopReason.ANSWERED,
    "number": -7,
    "long": 2**62,
    "fraction": 0.25,
    "whole": 1.0,
    "true": True,
    "false": False,
    "one": 1,
    "texts": ("a", "b"),
    "numbers": [1, 2],
    "none": (),
    "bytes": b"\0\1",
    "nested": {"a": [1, {"b": None}]},
}


def flat(request: ExportTraceServiceRequest) -> list[opb.ResourceSpans]:
    """One message a span, in the order of their ids."""
    found: list[opb.ResourceSpans] = []
    for group in request.resource_spans:
        for scoped in group.scope_spans:
            for each in scoped.spans:
                alone = opb.ScopeSpans(scope=scoped.scope, schema_url=scoped.schema_url, spans=[each])
                found.append(
                    opb.ResourceSpans(resource=group.resource, schema_url=group.schema_url, scope_spans=[alone])
                )
    return sorted(found, key=lambda message: message.scope_spans[0].spans[0].span_id)


def children(both: Both) -> None:
    """Those that are encoded here, at least two of each, and those that are not."""
    for parent in (LOCAL, REMOTE, LOCAL, REMOTE, PARENT):
        both.ours.child("each", parent, VALUES).end()
        both.ours.child("silent", parent, None).end()
        failed = both.ours.child("failed", parent, {"turn": 1})
        failed.set_status(Status(StatusCode.ERROR, "it broke"))
        failed.end()
        seen = both.ours.child("seen", parent, None)
        seen.add_event("a kestrel", VALUES)
        seen.end()
    root = both.sdk.start_span("root", attributes=VALUES)
    root.end()
    both.sdk.start_span("theirs", context=trace.set_span_in_context(root)).end()


def test_all_spans_are_encoded_as_by_the_sdk(both: Both) -> None:
    children(both)
    made = both.kept.get_finished_spans()
    assert len(made) == 22
    assert flat(encode(made, both.ours.scope)) == flat(encode_spans(made))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_spans_are_encoded_too(both: Both, count: int) -> None:
    for _ in range(count):
        both.ours.child("each", REMOTE, VALUES).end()
    made = both.kept.get_finished_spans()
    request = encode(made, both.ours.scope)
    assert flat(request) == flat(encode_spans(made))
    assert len(request.resource_spans) == min(count, 1)


def test_equal_values_of_different_types_are_distinguished(both: Both) -> None:
    """1, 1.0 and True are equal in Python, and no two of them on the wire."""
    for value in (1, 1.0, True, 0, 0.0, False, (1,), (1.0,), (True,), ("1",), [1]):
        both.ours.child("each", LOCAL, {"value": value}).end()
    made = both.kept.get_finished_spans()
    assert flat(encode(made, both.ours.scope)) == flat(encode_spans(made))


def test_what_is_exported_reaches_a_collector(both: Both) -> None:
    children(both)
    made = both.kept.get_finished_spans()
    with collecting() as collector:
        exporter = Exporter(both.ours.scope, collector.endpoint)
        assert exporter.export(made) is SpanExportResult.SUCCESS
        exporter.shutdown()
    assert len(collector.spans) == len(made)


@pytest.mark.parametrize(
    ("sampler", "ours"),
    [
        ("parentbased_always_on", True),
        ("parentbased_traceidratio", True),
        ("always_off", False),
        ("traceidratio", False),
    ],
)
def test_a_sampler_that_is_not_parent_based_sees_every_span(
    monkeypatch: pytest.MonkeyPatch, sampler: str, ours: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setattr(export.trace, "set_tracer_provider", lambda _: None)
    monkeypatch.setattr(export.atexit, "register", lambda _: None)
    monkeypatch.setattr(export, "BatchSpanProcessor", lambda exporter, **_: SimpleSpanProcessor(exporter))
    pipeline = export.export_spans(Resource.create({}), "http://127.0.0.1:1", tracer="kestrl")
    assert (pipeline is not None) is ours


def test_children_of_an_unsampled_parent_are_not_recorded(exported: Both) -> None:
    with beneath(SpanContext(7, 9, is_remote=True)), span("kestrl.model_call") as made:
        assert not made.is_recording()
        assert trace_headers()["traceparent"].endswith("-00")
    assert exported.kept.get_finished_spans() == ()
