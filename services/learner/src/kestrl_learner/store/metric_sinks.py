"""The metric sinks of a run, each in its own thread behind a bounded queue: none can delay or end a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Full, Queue
from typing import Any, cast

from kestrl._shared.plan.settings.learner import SinkEntry
from kestrl.errors import Boundary, Failure, KestrlError, UserInputError, described
from kestrl.importing import load
from kestrl.metric_sinks import MetricSink, RunStart
from kestrl.storage import ObjectStore
from kestrl.storage.summary import RunSummary
from kestrl_learner.store.opentelemetry_sink import OpenTelemetrySink
from kestrl_learner.store.storage_sink import StorageSink

log = logging.getLogger(__name__)
QUEUE = 256
"""Maximum records that wait for a slow sink; further ones are dropped, and reported."""
CLOSE_SECONDS = 30.0
"""Maximum seconds at the end of a run for the sinks to write what is pending."""
Record = Callable[[MetricSink], None]
Report = Callable[[Failure], None]


def make_sinks(store: ObjectStore, entries: Sequence[SinkEntry]) -> dict[str, MetricSink]:
    """The sinks of a run by name: storage, OpenTelemetry, and those of the job. Two of the job may be of one class.

    Raises:
        UserInputError: A sink cannot be imported or made.
    """
    sinks: dict[str, MetricSink] = {"storage": StorageSink(store), "opentelemetry": OpenTelemetrySink()}
    for entry in entries:
        sinks[entry.use if entry.use not in sinks else f"{entry.use} ({entry.field})"] = _made(entry)
    return sinks


def _made(entry: SinkEntry) -> MetricSink:
    kind = load(entry.use, field=f"{entry.field}.use")
    try:
        return cast("MetricSink", kind(**entry.config))
    except Exception as error:  # the user's class may raise anything
        raise UserInputError(
            f"{entry.field}.config: {entry.use} cannot be made with {sorted(entry.config)}: {described(error)}"
        ) from error


class MetricSinks:
    """Passes records to every sink.

    Args:
        sinks: By name.
        report: Called with each failure of a sink, from any thread.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], report: Report) -> None:
        self._workers = [_Worker(name, sink, report) for name, sink in sinks.items()]
        self._finished = False

    def start(self, run: RunStart) -> None:
        """Starts the sinks."""
        for worker in self._workers:
            worker.start(run)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        self._put(lambda sink: sink.step(step, record))

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        self._put(lambda sink: sink.evaluation(step, means))

    def finish(self, summary: RunSummary | None) -> None:
        """Passes the result, if there is one, and waits until everything is written, at most `CLOSE_SECONDS`.

        Only the first call has an effect.
        """
        if self._finished:
            return
        self._finished = True
        if summary is not None:
            self._put(lambda sink: sink.finish(summary))
        until = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(until)

    def _put(self, record: Record) -> None:
        for worker in self._workers:
            worker.put(record)


class _Worker:
    """The thread of one sink."""

    def __init__(self, name: str, sink: MetricSink, report: Report) -> None:
        self._name, self._sink, self._report = name, sink, report
        self._records: Queue[Record | None] = Queue(QUEUE)
        self._stopping = threading.Event()
        self._begin: Record = lambda _: None
        self._started = False
        # A daemon: a sink that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"metric-sink-{name}", daemon=True)

    def start(self, run: RunStart) -> None:
        self._begin = lambda sink: sink.start(run)
        self._thread.start()

    def put(self, record: Record) -> None:
        try:
            self._records.put_nowait(record)
        except Full:
            self._failed("metric_sink_slow", f"{QUEUE} records wait for it; one was dropped")

    def stop(self) -> None:
        """Ends the thread after the records that wait."""
        self._stopping.set()
        try:
            self._records.put_nowait(None)
        except Full:
            log.debug("metric sink %s ends after its %d records", self._name, QUEUE)

    def join(self, until: float) -> None:
        """Waits until a time of the monotonic clock."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            backlog = self._records.qsize()
            self._failed("metric_sink_slow", f"it did not end within {CLOSE_SECONDS:g} s; {backlog} records are lost")

    def _work(self) -> None:
        self._begun()
        while not (self._stopping.is_set() and self._records.empty()):
            record = self._records.get()
            if record is not None and self._begun():
                self._attempt(record)
        self._attempt(lambda sink: sink.close())

    def _begun(self) -> bool:
        """Whether the sink is started; starts it if not."""
        self._started = self._started or self._attempt(self._begin)
        return self._started

    def _attempt(self, record: Record) -> bool:
        try:
            record(self._sink)
        except KestrlError as error:
            self._failed(error.code, str(error), error.boundary)
            return False
        except Exception as error:  # noqa: BLE001 - a user's sink may raise anything; it is reported
            self._failed("metric_sink_raised", described(error), Boundary.USER_CODE)
            return False
        return True

    def _failed(self, code: str, message: str, boundary: Boundary = Boundary.INFRASTRUCTURE) -> None:
        message = f"metric sink {self._name}: {message}"
        log.warning("%s", message)
        self._report(Failure(boundary=boundary, code=code, message=message))
