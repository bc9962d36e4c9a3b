"""The part of telemetry that imports the SDK; loaded only if spans or metrics are exported."""

from __future__ import annotations

import atexit

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import start_http_server

from kestrl.errors import UserInputError
from kestrl.telemetry.child_spans import Pipeline
from kestrl.telemetry.encoding import Exporter
from kestrl.telemetry.names import Attr
from kestrl.telemetry.root_ids import ROOT


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
        named = ROOT.get()
        return super().generate_trace_id() if named is None else named[0]

    def generate_span_id(self) -> int:
        """Id of the given root once; its children get random ids."""
        named = ROOT.get()
        if named is None:
            return super().generate_span_id()
        ROOT.set(None)
        return named[1]


def export_spans(resource: Resource, endpoint: str | None, *, tracer: str) -> Pipeline | None:
    """Sends spans to `endpoint`, or to where the OTEL_* variables say.

    Returns the pipeline for child spans of `tracer`; None if OTEL_TRACES_SAMPLER is not parent-based.
    """
    ids, scope = RootIds(), InstrumentationScope(tracer, "")
    provider = TracerProvider(resource=resource, id_generator=ids)
    processor = BatchSpanProcessor(Exporter(scope, endpoint), max_queue_size=8192)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    atexit.register(provider.shutdown)
    if not isinstance(provider.sampler, ParentBased):
        return None
    return Pipeline(ids=ids, processor=processor, resource=resource, scope=scope)


def serve_metrics(resource: Resource, listen: str, *, exports: bool, endpoint: str | None) -> None:
    """Serves metrics of this process for Prometheus, including memory and CPU; with `exports` also sends them to the
    endpoint of spans.

    Raises:
        UserInputError: The port is taken.
    """
    readers: list[MetricReader] = [PrometheusMetricReader()]
    if exports:
        exporter = OTLPMetricExporter(endpoint=endpoint, insecure=True) if endpoint else OTLPMetricExporter()
        readers.append(PeriodicExportingMetricReader(exporter))
    provider = MeterProvider(metric_readers=readers, resource=resource)
    metrics.set_meter_provider(provider)
    atexit.register(provider.shutdown)
    host, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), addr=host)
    except OSError as error:
        raise UserInputError(f"metrics: cannot listen on {listen}: {error.strerror}") from error
