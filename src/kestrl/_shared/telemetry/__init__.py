"""OpenTelemetry for every process: set up once in `main`, then `span(...)` wherever work is done.

Without an endpoint (settings or OTEL_EXPORTER_OTLP_ENDPOINT) nothing of the SDK is imported and a span costs a no-op.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from opentelemetry import context, trace
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Link, Span, Status, StatusCode

from kestrl._shared.telemetry.names import Attr
from kestrl._shared.telemetry.root_ids import ROOT, ids_of
from kestrl.engines.otlp import named_endpoint
from kestrl.errors import KestrlError

__all__ = [
    "Unended",
    "beginning",
    "current_trace_id",
    "event",
    "ids_of",
    "set_up",
    "span",
    "trace_headers",
    "unrecorded",
    "within",
]

TRACER = "kestrl"
_tracer = trace.get_tracer(TRACER)


UNRECORDED = f"00-{'1' * 32}-{'1' * 16}-00"
"""W3C context that is not sampled."""


def set_up(
    component: str,
    *,
    job: str,
    run: str,
    endpoint: str | None = None,
    traced_groups: float = 1.0,
    metrics_listen: str | None = None,
) -> None:
    """Sends this process's spans by OTLP when an endpoint is given or the standard OTEL_* variables name one.

    Metrics can be read at `http://METRICS_LISTEN/metrics`, and go to the same endpoint as spans.

    Args:
        component: Name of the process, such as `rollout-0`.
        job: Name of the job.
        run: Id of the run.
        endpoint: OTLP endpoint for spans and metrics.
        traced_groups: Share of groups whose spans are recorded.
        metrics_listen: `host:port` of the Prometheus endpoint.

    Raises:
        UserInputError: `metrics_listen` is taken.
    """
    exports = bool(endpoint or named_endpoint("traces")) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
    if not exports and metrics_listen is None:
        return
    from kestrl._shared.telemetry.export import export_spans, resource_of, serve_metrics

    resource = resource_of(component, job=job, run=run)
    if exports:
        export_spans(resource, endpoint, traced_groups=traced_groups)
    if metrics_listen is not None:
        serve_metrics(resource, metrics_listen, exports=exports, endpoint=endpoint)


class Unended:
    """Spans whose work is over and whose outcome is not known yet, by key. At the end of the block each ends with the
    time at which its work was over.
    """

    def __init__(self) -> None:
        self._spans: dict[str, tuple[Span, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for current, end in self._spans.values():
            current.end(end)

    @property
    def recorded(self) -> bool:
        """Whether there are spans; those that are not sampled are none."""
        return bool(self._spans)

    def add(self, key: str, current: Span) -> None:
        """Adds a span whose work is over now."""
        if current.is_recording():
            self._spans[key] = current, time.time_ns()

    def set(self, key: str, attributes: Mapping[str, str | float]) -> None:
        """Sets attributes of a span."""
        self._spans[key][0].set_attributes(attributes)


class span:  # noqa: N801 - used as a verb: `with span(...)`
    """A span around a piece of work. A `KestrlError` marks it with its boundary and code; every error marks it failed.

    With `root`, a W3C context, it begins a trace of its own with these ids, which is linked to the current span.

    A class, since every call of a model or tool makes a span, and two generators would cost as much as the span.
    """

    __slots__ = ("_attributes", "_key", "_name", "_root", "_span", "_token", "_unended")

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, str | int | float | bool] | None = None,
        *,
        unended: Unended | None = None,
        key: str = "",
        root: str = "",
    ) -> None:
        self._name, self._attributes, self._unended, self._key, self._root = name, attributes, unended, key, root

    def __enter__(self) -> Span:
        self._span = self._begun_root() if self._root else _tracer.start_span(self._name, attributes=self._attributes)
        self._token = context.attach(trace.set_span_in_context(self._span))
        return self._span

    def _begun_root(self) -> Span:
        current = trace.get_current_span().get_span_context()
        links = [Link(current)] if current.is_valid else []
        with beginning(self._root):
            return _tracer.start_span(self._name, context.Context(), attributes=self._attributes, links=links)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context.detach(self._token)
        if isinstance(error, KestrlError):
            self._span.set_attributes({Attr.FAILURE_BOUNDARY: str(error.boundary), Attr.ERROR_TYPE: error.code})
            self._span.set_status(Status(StatusCode.ERROR, str(error)[:500]))
        elif isinstance(error, Exception):
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500]))
        if self._unended is None:
            self._span.end()
        else:
            self._unended.add(self._key, self._span)


@contextmanager
def within(traceparent: str) -> Generator[None]:
    """Spans in the block are children of this W3C context."""
    token = context.attach(extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def unrecorded() -> Generator[None]:
    """Requests in the block are recorded by nobody: many small ones that one span stands for."""
    with within(UNRECORDED):
        yield


@contextmanager
def beginning(traceparent: str) -> Generator[None]:
    """The first span of the block gets the ids of this W3C context: the root of a trace whose ids are known in
    advance.
    """
    _, trace_id, span_id, _ = traceparent.split("-")
    token = ROOT.set((int(trace_id, 16), int(span_id, 16)))
    try:
        yield
    finally:
        ROOT.reset(token)


def event(name: str, attributes: Mapping[str, str | int | float | bool]) -> None:
    """Adds an event to the current span."""
    trace.get_current_span().add_event(name, attributes)


def current_trace_id() -> str:
    """Current trace id as 32 hex digits; empty if the current work is not traced."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""


def trace_headers() -> dict[str, str]:
    """W3C headers for an HTTP request, with the decision of the sampler; empty if spans are not exported."""
    headers: dict[str, str] = {}
    inject(headers)
    return headers
