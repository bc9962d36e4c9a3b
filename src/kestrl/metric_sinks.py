"""Metric sinks: destinations of a run's metrics, such as an experiment tracker.

The files under `metrics/` and OpenTelemetry are sinks, always; a job adds its own with `telemetry.sinks`. A sink gets
every number of a run and decides nothing: what it raises is reported, and the run goes on.
`kestrl.testing.metric_sinks` has the conformance suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl.storage.summary import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A process of a run that begins to train or to evaluate."""

    job: str
    """Name of the job."""
    run: str
    """Id of the run, the same for all its processes."""
    storage: str
    """Address of the run's storage."""
    total_steps: int


class MetricSink(Protocol):
    """A destination of metrics. All calls come from one thread of the sink's own, one after another.

    A resumed run calls `start` again in another process, and repeats steps that no checkpoint held: the later record of
    a step replaces the earlier one.
    """

    def start(self, run: RunStart) -> None:
        """Begins, or continues, the run. If it raises, it is called again before the next record."""
        ...

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Takes the record of an optimiser step, as in docs/storage.md; the first step is 1.

        Values are JSON: numbers, which may be NaN or infinite, texts, and objects of them. New names may appear in any
        step. The record is shared with other sinks and must not be changed.
        """
        ...

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Takes the means over the held-out data after a step; 0 is before training."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Takes the result; the last record. A process that is killed never calls it."""
        ...

    def close(self) -> None:
        """Writes what is pending and releases everything; called once, also without `start` or `finish`."""
        ...
