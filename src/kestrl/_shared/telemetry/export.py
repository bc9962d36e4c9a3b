"""The part of telemetry that imports the SDK; loaded only if spans or metrics are exported."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from functools import partial

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from prometheus_client import start_http_server

from kestrl._shared.telemetry.names import Attr
from kestrl._shared.telemetry.root_ids import ROOT
from kestrl._shared.telemetry.rotating import metric_exporter, span_exporter
from kestrl._shared.telemetry.sampling import sampler
from kestrl.engines.otlp import signal_url, uses_http
from kestrl.errors import UserInputError


def resource_of(component: str, *, job: str, run: str) -> Resource:
    """Resource of a process in spans and metrics."""
    role = component.partition("-")[0]
    return Resource.create(
        {"service.name": f"kestrl-{role}", "service.instance.id": component, Attr.JOB: job, Attr.RUN: run}
    )


class RootIds(RandomIdGenerator):
    """Generates random ids, except for a root span with given ids."""

    def generate_trace_id(self) -> int:
        """Called for spans without a parent only."""
        root_ids = ROOT.get()
        return super().generate_trace_id() if root_ids is None else root_ids[0]

    def generate_span_id(self) -> int:
        """Id of the given root once; its children get random ids."""
        root_ids = ROOT.get()
        if root_ids is None:
            return super().generate_span_id()
        ROOT.set(None)
        return root_ids[1]


def export_spans(resource: Resource, endpoint: str | None, *, traced_groups: float) -> TracerProvider:
    """Sends spans to `endpoint`, or to where the OTEL_* variables say.

    They are sampled as OTEL_TRACES_SAMPLER says, or else by groups, of which a share of `traced_groups` is sampled.
    """
    configured = os.environ.get("OTEL_TRACES_SAMPLER")
    provider = TracerProvider(
        resource=resource, id_generator=RootIds(), sampler=None if configured else sampler(traced_groups)
    )
    provider.add_span_processor(BatchSpanProcessor(span_exporter(partial(_of_spans, endpoint)), max_queue_size=8192))
    trace.set_tracer_provider(provider)
    atexit.register(provider.shutdown)
    return provider


def _of_spans(endpoint: str | None, headers: Mapping[str, str] | None) -> SpanExporter:
    if uses_http(endpoint, "traces"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=signal_url(endpoint, "traces") if endpoint else None, headers=headers)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint, insecure=_insecure(endpoint), headers=_metadata(headers))


def _of_metrics(endpoint: str | None, headers: Mapping[str, str] | None) -> MetricExporter:
    if uses_http(endpoint, "metrics"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(endpoint=signal_url(endpoint, "metrics") if endpoint else None, headers=headers)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint, insecure=_insecure(endpoint), headers=_metadata(headers))


def _metadata(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if headers is None else {name.lower(): value for name, value in headers.items()}


def _insecure(endpoint: str | None) -> bool | None:
    """Whether the connection is unencrypted; None leaves it to the OTEL_* variables."""
    return None if endpoint is None else not endpoint.startswith("https://")


def serve_metrics(resource: Resource, listen: str, *, exports: bool, endpoint: str | None) -> None:
    """Serves metrics of this process for Prometheus, including memory and CPU; with `exports` also sends them to the
    endpoint of spans.

    Raises:
        UserInputError: The port is taken.
    """
    readers: list[MetricReader] = [PrometheusMetricReader()]
    if exports:
        readers.append(PeriodicExportingMetricReader(metric_exporter(partial(_of_metrics, endpoint))))
    provider = MeterProvider(metric_readers=readers, resource=resource)
    metrics.set_meter_provider(provider)
    atexit.register(provider.shutdown)
    host, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), addr=host)
    except OSError as error:
        raise UserInputError(f"metrics: cannot listen on {listen}: {error.strerror}") from error
