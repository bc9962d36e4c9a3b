"""Child spans at a third of the cost of the SDK's spans.

A rollout worker makes two per turn. One of the SDK takes 20 us and a dozen objects for the garbage collector, since it
supports links, limits and threads; these support what KestRL uses, and OTEL_SPAN_* limits do not apply. Configurable
parts are the SDK's: root spans, ids, processors, exporters, and the sampler. Child spans are only used with a
parent-based sampler (the default), which decides nothing about children of sampled spans. `tests/unit/test_spans.py`
compares the exported spans of both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

_UNSET = Status(StatusCode.UNSET)


class Pipeline(NamedTuple):
    """Shared state of the spans of a process."""

    ids: IdGenerator
    processor: SpanProcessor
    resource: Resource
    scope: InstrumentationScope

    def child(self, name: str, parent: SpanContext, attributes: Mapping[str, AttributeValue] | None) -> ChildSpan:
        """Starts a child of a sampled span."""
        return ChildSpan(self, name, parent, attributes)


class ChildSpan(trace.Span):
    """A recorded span with a parent and without links."""

    __slots__ = ("_attributes", "_began", "_context", "_ended", "_events", "_name", "_parent", "_pipeline", "_status")

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        parent: SpanContext,
        attributes: Mapping[str, AttributeValue] | None,
    ) -> None:
        self._pipeline, self._name, self._parent = pipeline, name, parent
        self._context = SpanContext(
            parent.trace_id,
            pipeline.ids.generate_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )
        self._attributes = dict(attributes) if attributes else {}
        self._events: tuple[Event, ...] = ()
        self._status = _UNSET
        self._ended = False
        self._began = time.time_ns()

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self._ended

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if not self._ended:
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if not self._ended:
            self._attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if not self._ended:
            self._events += (Event(name, attributes, timestamp),)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        described = {"exception.type": type(exception).__qualname__, "exception.message": str(exception)}
        self.add_event("exception", {**described, "exception.escaped": str(escaped), **(attributes or {})}, timestamp)

    def update_name(self, name: str) -> None:
        self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = Status(status, description) if isinstance(status, StatusCode) else status

    def end(self, end_time: int | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._pipeline.processor.on_end(
            ReadableSpan(
                name=self._name,
                context=self._context,
                parent=self._parent,
                resource=self._pipeline.resource,
                attributes=self._attributes,
                events=self._events,
                status=self._status,
                start_time=self._began,
                end_time=end_time or time.time_ns(),
                instrumentation_scope=self._pipeline.scope,
            )
        )
