"""The SDK half of telemetry, imported only when spans are really sent."""

from __future__ import annotations

import atexit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kestrl.telemetry.names import Attr


def install(component: str, *, job: str, run: str, endpoint: str | None) -> None:
    """Installs a tracer provider whose spans go to `endpoint`, or to what the OTEL_* variables say."""
    role = component.rsplit("-", 1)[0]
    resource = Resource.create(
        {"service.name": f"kestrl-{role}", "service.instance.id": component, Attr.JOB: job, Attr.RUN: run}
    )
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True) if endpoint else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=8192))
    trace.set_tracer_provider(provider)
    atexit.register(provider.shutdown)
