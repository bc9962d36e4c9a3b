"""A real collector with the example of docs/telemetry.md, and what it keeps of a run's traces."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.fakes.collector import Collector, collecting
from tests.fakes.ports import free_port
from tests.fakes.tail_sampling import tail_sampling
from tests.go import find_go

import kestrl._shared.telemetry
from kestrl._shared.telemetry import ids_of, span, within
from kestrl._shared.telemetry.export import RootIds
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.errors import Boundary, KestrlError

OTELCOL = Path(__file__).parents[3] / "scripts" / "otelcol"
# Its module takes minutes to compile.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1_800)]
WAIT_SECONDS = 2


class ToolFailed(KestrlError):
    """A failure of a tool."""

    boundary = Boundary.TOOL
    code = "tool_raised"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collector."""
    go = find_go()
    if go is None:
        pytest.skip("there is no go: make kit installs one")
    built = tmp_path_factory.mktemp("otelcol") / "otelcol"
    subprocess.run([go, "build", "-mod=readonly", "-o", built, "."], cwd=OTELCOL, check=True)
    return built


def configuration(port: int, upstream: str) -> dict[str, Any]:
    """The example between a receiver and an exporter, with a shorter wait and nothing kept by chance."""
    processors = tail_sampling()
    sampling = processors["processors"]["tail_sampling"]
    sampling["decision_wait"] = f"{WAIT_SECONDS}s"
    policies = [policy for policy in sampling["policies"] if policy["type"] != "probabilistic"]
    assert len(policies) == len(sampling["policies"]) - 1
    sampling["policies"] = policies
    return {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{port}"}}}},
        **processors,
        "exporters": {
            "otlp": {
                "endpoint": upstream.removeprefix("http://"),
                "tls": {"insecure": True},
                "sending_queue": {"enabled": False},
            }
        },
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {
                "traces": {"receivers": ["otlp"], "processors": ["tail_sampling"], "exporters": ["otlp"]},
            },
        },
    }


@contextmanager
def running(program: Path, folder: Path, upstream: Collector) -> Generator[str]:
    """The endpoint of a collector with the example."""
    port = free_port()
    file = folder / "otelcol.yaml"
    file.write_text(yaml.safe_dump(configuration(port, upstream.endpoint)))
    log = folder / "otelcol.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([program, f"--config=file:{file}"], stdout=output, stderr=output) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while b"Everything is ready" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)  # a log has no event
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def group(name: str, reward: float, advantage: float | None, *, fails: bool = False) -> None:
    """The trace of a group as its processes send it."""
    with span(SpanName.GROUP, {Attr.GROUP_ID: name}, root=ids_of(name)):
        try:
            with span(SpanName.EPISODE, {Attr.REWARD: reward}):
                if fails:
                    raise ToolFailed("the shelf is locked")
        except ToolFailed:
            pass
    if advantage is not None:
        with within(ids_of(name)), span(SpanName.ADVANTAGE, {Attr.ADVANTAGE: advantage}):
            pass


def arrived(upstream: Collector, count: int) -> None:
    """Waits for so many spans."""
    deadline = time.monotonic() + 60
    while len(upstream.spans) < count and time.monotonic() < deadline:
        time.sleep(0.1)  # a collector has no event


def test_a_collector_keeps_what_failed_and_what_is_learned_from(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as upstream, running(program, tmp_path, upstream) as endpoint:
        provider = TracerProvider(id_generator=RootIds(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        monkeypatch.setattr(kestrl._shared.telemetry, "_tracer", provider.get_tracer("kestrl"))
        with span(SpanName.JOB):
            group("nothing", 0.5, 0.25)
            group("untrained", 0.5, None)
            group("failed", 0.0, None, fails=True)
            group("learned", 1.0, 1.5)
            group("low", -0.5, 0.25)
            with span(SpanName.PUBLISH):
                pass
        arrived(upstream, 10)
        group("last", 0.0, None, fails=True)  # what came before it is decided on when it arrives
        arrived(upstream, 12)
        provider.shutdown()
    expected = {"failed": 2, "learned": 3, "low": 3, "last": 2}
    traces = {ids_of(name).split("-")[1]: name for name in ("nothing", "untrained", *expected)}
    kept = [traces.get(span.trace_id, "run") for span in upstream.spans.values()]
    assert {name: kept.count(name) for name in set(kept)} == {**expected, "run": 2}
