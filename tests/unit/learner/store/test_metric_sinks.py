"""Metric sinks: members and users' own get every record, and none of them can delay or end a run."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kestrl._shared.plan.settings.learner import SinkEntry
from kestrl.errors import Boundary, Failure, StorageError, UserInputError
from kestrl.metric_sinks import MetricSink, RunStart
from kestrl.runstate.states import RunPhase
from kestrl.storage import open_store
from kestrl.storage.summary import RunSummary
from kestrl.testing.metric_sinks import check_metric_sink, record
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import metric_sinks
from kestrl_learner.store.metric_sinks import MetricSinks, make_sinks
from kestrl_learner.store.opentelemetry_sink import OpenTelemetrySink
from kestrl_learner.store.storage_sink import StorageSink

RUN = RunStart(job="job", run="job-1", storage="file:///x", total_steps=2)
FAILED = RunSummary(status=RunPhase.FAILED, reason="x")


class Tracker:
    """A sink that keeps its calls; calls named in `broken` raise."""

    made: ClassVar[list[Tracker]] = []

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.broken = set(broken)
        self.threads: set[str] = set()
        Tracker.made.append(self)

    def _call(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        self.threads.add(threading.current_thread().name)
        if name in self.broken:
            raise ConnectionError(f"{name}: no tracker")

    def start(self, run: RunStart) -> None:
        self._call("start", run.run)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        assert record["step"] == step
        self._call("step", step)

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        assert "reward" in means
        self._call("evaluation", step)

    def finish(self, summary: RunSummary) -> None:
        self._call("finish", summary.status)

    def close(self) -> None:
        self._call("close", None)

    def steps(self) -> list[int]:
        return [value for name, value in self.calls if name == "step"]


@pytest.fixture(autouse=True)
def trackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tracker]]:
    module = ModuleType("trackers_of_a_user")
    module.Tracker = Tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Tracker.made.clear()
    yield Tracker.made
    Tracker.made.clear()


def entry(use: str = "trackers_of_a_user:Tracker", **config: Any) -> SinkEntry:
    return SinkEntry(use=use, config=config, field="spec.telemetry.sinks[0]")


def test_the_members_conform(tmp_path: Path) -> None:
    check_metric_sink(lambda: StorageSink(open_store(str(tmp_path))))
    check_metric_sink(OpenTelemetrySink)
    check_metric_sink(Tracker)
    stored = json.loads((tmp_path / "metrics" / "000002.json").read_text())
    assert math.isnan(stored["loss"])
    assert stored["appears_in_step_2"] == 1.0


def test_the_suite_names_what_a_sink_does_wrong() -> None:
    class Changing(Tracker):
        def step(self, step: int, record: Mapping[str, Any]) -> None:
            record.pop("loss")  # type: ignore[attr-defined]

    class Finite(Tracker):
        def step(self, step: int, record: Mapping[str, Any]) -> None:
            json.dumps(record, allow_nan=False)

    class Hanging(Tracker):
        def close(self) -> None:
            threading.Event().wait()

    with pytest.raises(AssertionError, match="must not be changed"):
        check_metric_sink(Changing)
    with pytest.raises(ValueError, match="not JSON compliant"):
        check_metric_sink(Finite)
    with pytest.raises(AssertionError, match="a run that succeeds: the sink did not return"):
        check_metric_sink(Hanging, seconds=0.2)


async def test_a_users_sink_gets_a_whole_run(staged: Any, trackers: list[Tracker]) -> None:
    async with staged(max_steps=4, eval_every=2, sinks=(entry(),)) as stage:
        await LearnerRun(stage.settings).main()
        (tracker,) = trackers
        assert tracker.calls == [
            ("start", "test-1"),
            ("evaluation", 0),
            ("step", 1),
            ("step", 2),
            ("evaluation", 2),
            ("step", 3),
            ("step", 4),
            ("evaluation", 4),
            ("finish", "succeeded"),
            ("close", None),
        ]
        assert tracker.threads == {"metric-sink-trackers_of_a_user:Tracker"}
        assert stage.read("metrics/000004.json")["step"] == 4


async def test_two_sinks_may_be_of_one_class(staged: Any, trackers: list[Tracker]) -> None:
    second = entry().model_copy(update={"field": "spec.telemetry.sinks[1]"})
    async with staged(max_steps=2, sinks=(entry(), second)) as stage:
        await LearnerRun(stage.settings).main()
    assert [tracker.steps() for tracker in trackers] == [[1, 2], [1, 2]]


async def test_a_broken_sink_is_reported_and_the_run_goes_on(staged: Any, trackers: list[Tracker]) -> None:
    async with staged(max_steps=2, sinks=(entry(broken=("step", "close")),)) as stage:
        run = LearnerRun(stage.settings)
        await run.main()
        assert stage.summary["status"] == "succeeded"
        assert trackers[0].steps() == [1, 2]
        assert run.progress.state.history.failures["user_code/metric_sink_raised"] >= 2
        assert stage.read("metrics/000002.json")["step"] == 2


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (entry("no_such_module_x:Sink"), r"spec\.telemetry\.sinks\[0\]\.use: cannot import"),
        (entry("trackers_of_a_user:Other"), r"sinks\[0\]\.use: module .* has no 'Other'"),
        (entry(broke=1), r"sinks\[0\]\.config: .* cannot be made with \['broke'\]: TypeError"),
    ],
)
def test_a_sink_that_cannot_be_made_is_refused(sink: SinkEntry, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message):
        make_sinks(open_store(str(tmp_path)), [sink])


def passed(sink: MetricSink, *, steps: int) -> list[Failure]:
    """The failures of a sink that gets so many steps."""
    failures: list[Failure] = []
    sinks = MetricSinks({"own": sink}, failures.append)
    sinks.start(RUN)
    for step in range(1, steps + 1):
        sinks.step(step, record(step))
    sinks.finish(FAILED)
    sinks.finish(FAILED)
    return failures


def test_a_failed_start_is_repeated_before_the_next_record() -> None:
    class Late(Tracker):
        def start(self, run: RunStart) -> None:
            self._call("start", run.run)
            if len(self.calls) == 1:
                raise ConnectionError("not up yet")

    sink = Late()
    (failure,) = passed(sink, steps=2)
    assert "metric sink own: ConnectionError: not up yet" in failure.message
    assert [name for name, _ in sink.calls] == ["start", "start", "step", "step", "finish", "close"]


def test_a_typed_failure_keeps_its_type() -> None:
    class Refused(Tracker):
        def finish(self, summary: RunSummary) -> None:
            raise StorageError("full", code="quota")

    (failure,) = passed(Refused(), steps=1)
    assert (failure.boundary, failure.code) == (Boundary.INFRASTRUCTURE, "quota")


def test_a_hanging_sink_delays_neither_records_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sinks, "QUEUE", 2)
    monkeypatch.setattr(metric_sinks, "CLOSE_SECONDS", 0.2)
    release, other = threading.Event(), Tracker()

    class Hanging(Tracker):
        def start(self, run: RunStart) -> None:
            release.wait()

    failures: list[Failure] = []
    sinks = MetricSinks({"hanging": Hanging(), "other": other}, failures.append)
    sinks.start(RUN)
    for step in range(1, 5):
        sinks.step(step, record(step))
    sinks.finish(FAILED)
    release.set()
    slow = [failure.message for failure in failures if "metric sink hanging" in failure.message]
    assert all(failure.code == "metric_sink_slow" for failure in failures)
    assert sum("one was dropped" in message for message in slow) >= 2
    assert "it did not end within 0.2 s" in slow[-1]
    assert other.calls[-1] == ("close", None)
