"""Spans that have a parent are ours; on the wire they are what the SDK's would be."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1 import trace_pb2 as opb
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags, TraceState

import kestrl.telemetry
from kestrl.errors import EngineFailure
from kestrl.telemetry import export, span, trace_headers
from kestrl.telemetry.children import Pipeline

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
            (told,) = message.scope_spans[0].spans
            assert len(told.span_id) == 8
            assert 0 < told.start_time_unix_nano <= told.end_time_unix_nano
            for each in told.events:
                assert told.start_time_unix_nano <= each.time_unix_nano
                each.time_unix_nano = 0
            told.attributes.sort(key=lambda attribute: attribute.key)  # the SDK's are in the order of their last change
            told.span_id, told.start_time_unix_nano, told.end_time_unix_nano = b"", 0, 0
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
def test_on_the_wire_a_child_is_what_the_sdks_would_be(
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


def test_a_parents_children_are_ours_and_name_it(exported: Both) -> None:
    with span("root") as root, span("child", {"turn": 1}) as child:
        headers = trace_headers()
    assert type(root).__module__.startswith("opentelemetry.sdk")
    assert type(child).__module__ == "kestrl.telemetry.children"
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


@pytest.mark.parametrize(
    ("sampler", "ours"),
    [
        ("parentbased_always_on", True),
        ("parentbased_traceidratio", True),
        ("always_off", False),
        ("traceidratio", False),
    ],
)
def test_a_sampler_that_wants_to_be_asked_of_every_span_is(
    monkeypatch: pytest.MonkeyPatch, sampler: str, ours: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setattr(export.trace, "set_tracer_provider", lambda _: None)
    monkeypatch.setattr(export.atexit, "register", lambda _: None)
    monkeypatch.setattr(export, "BatchSpanProcessor", lambda exporter, **_: SimpleSpanProcessor(exporter))
    pipeline = export.export_spans(Resource.create({}), "http://127.0.0.1:1", tracer="kestrl")
    assert (pipeline is not None) is ours


def test_beneath_a_parent_that_is_not_sampled_nothing_is_recorded(exported: Both) -> None:
    with beneath(SpanContext(7, 9, is_remote=True)), span("kestrl.model_call") as made:
        assert not made.is_recording()
        assert trace_headers()["traceparent"].endswith("-00")
    assert exported.kept.get_finished_spans() == ()
