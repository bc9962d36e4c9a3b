"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.fakes.s3 import S3Server, serving_s3

from kestrl._shared import telemetry
from kestrl._shared.telemetry.export import RootIds

# For every property: how fast a busy machine is does not matter. Time is measured in `benchmarks/`.
settings.register_profile("kestrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kestrl")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Keeps the spans that this process makes during a test."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(id_generator=RootIds())
    provider.add_span_processor(SimpleSpanProcessor(memory))
    # Not the global provider, which could not be taken back.
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("kestrl"))
    yield memory
    provider.shutdown()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("runs")
        yield server


@pytest.fixture
def s3_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3
