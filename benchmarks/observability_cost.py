"""Cost of observability and verification: spans, ledger, stored episodes and adapter checks, as shares of a training
step.

A traced run of the quickstart on real engines gives the duration of a step, the number of spans and the duration of a
verification. The cost of a span, of a step's ledger entries and of its stored episodes is measured here with the same
content.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row, main
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tests.fakes.collector import Collector, collecting

from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import Purpose
from kestrl.storage import open_store
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl_learner.ledger import Ledger

JOB = Path(__file__).parents[1] / "examples" / "email-search" / "quickstart.yaml"
STEPS, GROUPS = 8, 8
LIMIT = 0.05


def traced_run(runs: Path, collector: Collector) -> Path:
    settings = (f"schedule.maxSteps={STEPS}", f"telemetry.otlp={collector.endpoint}", "data.validation.size=8")
    flags = [flag for item in settings for flag in ("--set", item)]
    command = [sys.executable, "-m", "kestrl._app.cli.main", "run", str(JOB), "--runs", str(runs), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "email-search-1"


def span_seconds(collector: Collector, count: int = 5_000) -> float:
    """CPU seconds per span for creating, encoding and sending it, as in the services."""
    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=collector.endpoint, insecure=True), max_queue_size=8192)
    )
    tracer = provider.get_tracer("kestrl")
    began = time.process_time()
    for number in range(count):
        with tracer.start_as_current_span(SpanName.MODEL_CALL, attributes={Attr.TURN: number, Attr.ENGINE: "engine-0"}):
            pass
    provider.shutdown()
    return (time.process_time() - began) / count


def ledger_seconds(folder: Path, steps: int = 50) -> float:
    """Seconds of a step's ledger entries: leases, completions and trainings."""
    ledger = Ledger(f"sqlite:///{folder / 'bench.db'}", seed=1, size=4000, epochs=1, run="bench")
    ledger.rewind(0)
    began = time.perf_counter()
    for step in range(steps):
        leases = [ledger.lease(step) for _ in range(GROUPS)]
        assert all(leases)
        for lease in leases:
            ledger.finish(lease)  # type: ignore[arg-type]
        ledger.train(leases, step + 1)  # type: ignore[arg-type]
    taken = (time.perf_counter() - began) / steps
    ledger.close()
    return taken


def store_seconds(run: Path, folder: Path) -> float:
    """Seconds for storing the episodes of the run's last step."""
    batch = ObjectEpisodeStore(open_store(run.as_uri())).read(Purpose.TRAIN, STEPS)
    episodes = ObjectEpisodeStore(open_store((folder / "bench").as_uri()))
    taken: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        episodes.append(batch)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name, collecting() as collector:
        folder = Path(name)
        run = traced_run(folder, collector)
        steps = [json.loads(path.read_text()) for path in sorted((run / "metrics").glob("*.json"))]
        step = statistics.median(sum(facts["seconds"].values()) for facts in steps)
        ours = [span for span in collector.spans.values() if span.run == "email-search-1"]
        of_training = [span for span in ours if "evaluate" not in collector.path(span)]
        proofs = [span.seconds for span in ours if span.name == SpanName.PROVE]
        costs = {
            "spans": len(of_training) / len(steps) * span_seconds(collector),
            "ledger": ledger_seconds(folder),
            "episodes": store_seconds(run, folder),
            "proofs": statistics.median(proofs),
        }
        for part, seconds in costs.items():
            yield Row(
                name=f"observability_cost/{part}",
                value=seconds * 1000,
                unit="ms/step",
                reference=step * 1000,
                against="a step",
            )
        share = sum(costs.values()) / step
        yield Row(name="observability_cost/all", value=100 * share, unit="%", reference=100 * LIMIT, against="limit")


if __name__ == "__main__":
    main(__doc__, measure)
