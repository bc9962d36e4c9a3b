"""The metric sink of a run's storage: a JSON file for each step and evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kestrl.metric_sinks import RunStart
from kestrl.storage import layout
from kestrl.storage.objects import ObjectStore
from kestrl.storage.summary import RunSummary


class StorageSink:
    """Writes `metrics/`. The summary is not its own: a run's end depends on it, so the run writes it itself."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def start(self, run: RunStart) -> None:
        """Nothing is needed: the files of earlier processes are kept."""

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        self._store.put(layout.step_metrics(step), json.dumps(record).encode())

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        self._store.put(layout.evaluation_metrics(step), json.dumps({"step": step, **means}).encode())

    def finish(self, summary: RunSummary) -> None:
        """The summary lies in `summary.json` already."""

    def close(self) -> None:
        """Nothing is held open."""
