"""The metric sink of OpenTelemetry: gauges of the last step and of the last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.metric_sinks import RunStart
from kestrl.storage.summary import RunSummary


def gap_statistics(step: Mapping[str, Any]) -> dict[str, float]:
    """The log-prob mismatch of a step's record to the policies that sampled the tokens, by statistic.

    Empty without tokens: an unmeasured mismatch is not a mismatch of 0.
    """
    statistics: dict[str, float] = step.get("gap", {}).get("own", {})
    return {name: value for name, value in statistics.items() if name != "tokens"} if statistics.get("tokens") else {}


class OpenTelemetrySink:
    """Keeps the last records, which are read when metrics are collected. One for each process."""

    def __init__(self) -> None:
        self._step: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, float] = {}
        observe(Metric.STALENESS, lambda: self._step.get("staleness", 0))
        observe(Metric.GAP, lambda: gap_statistics(self._step))
        observe(Metric.STEP_SECONDS, lambda: self._step.get("seconds", {}))
        observe(Metric.EVALUATION, lambda: self._evaluation)

    def start(self, run: RunStart) -> None:
        """Nothing is needed: the resource of every metric names the run."""

    def step(self, step: int, record: Mapping[str, Any]) -> None:  # noqa: ARG002 - Metric.STEP has the number
        self._step = record

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:  # noqa: ARG002 - as above
        self._evaluation = means

    def finish(self, summary: RunSummary) -> None:
        """A result is not a metric over time."""

    def close(self) -> None:
        """Metrics can still be read: a process that is kept alive after its run serves them."""
