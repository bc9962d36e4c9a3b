"""Conformance suite of metric sinks: what every `kestrl.metric_sinks.MetricSink` must bear.

A user's test calls `check_metric_sink(lambda: MySink(...))`. It raises AssertionError with the property that does not
hold, or what the sink raised.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

from kestrl.metric_sinks import MetricSink, RunStart
from kestrl.runstate.states import RunPhase
from kestrl.storage.summary import RunSummary, SummaryPolicy

RUN = RunStart(job="conformance", run="conformance-1", storage="file:///runs/conformance-1", total_steps=3)
MEANS = {"reward": 0.25, "answer_correct": 0.5, "num_turns": 2.0}


def record(step: int) -> dict[str, Any]:
    """A record of a step, with every kind of value that real ones have."""
    return {
        **MEANS,
        "step": step,
        "episodes": 8,
        "loss": math.nan if step == 2 else -0.125,
        "grad_norm": math.inf if step == 2 else 1.5,
        "gap": {"own": {"tokens": 64, "mean": 1e-7}, "engines": {"engine-0": {"max": 1e-6}}},
        "seconds": {"collect": 1.0, "update": 0.5, "rest": 0.0},
        "diagnostics": {"entropy": 0.5, "clip share / token \N{GREEK SMALL LETTER EPSILON}": 0.0},
        "by_staleness": {"0": 2},
        **({f"appears_in_step_{step}": 1.0} if step > 1 else {}),
    }


def check_metric_sink(make: Callable[[], MetricSink], *, seconds: float = 60.0) -> None:
    """Checks a sink on the records of runs that succeed, resume, fail, and end early.

    Args:
        make: Makes a sink as a job would; each call stands for a new process.
        seconds: Time limit of each life of a sink.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    _within(seconds, lambda: _succeeds(make()), "a run that succeeds")
    _within(seconds, lambda: _resumes(make()), "a run that is resumed and repeats a step")
    _within(seconds, lambda: _fails(make()), "a run that fails before its first step")
    _within(seconds, lambda: make().close(), "a process that ends before the run starts")


def _succeeds(sink: MetricSink) -> None:
    sink.start(RUN)
    sink.evaluation(0, MEANS)
    for step in (1, 2):
        step_record = record(step)
        original = copy.deepcopy(step_record)
        sink.step(step, step_record)
        assert repr(step_record) == repr(original), "a record is shared with other sinks and must not be changed"
    sink.close()  # the process is drained: no result yet


def _resumes(sink: MetricSink) -> None:
    sink.start(RUN)
    for step in (2, 3):
        sink.step(step, record(step))
    sink.evaluation(3, MEANS)
    policy = SummaryPolicy(version="conformance.3.0123456789ab", sha256="0123456789ab", uri="file:///adapter")
    sink.finish(RunSummary(status=RunPhase.SUCCEEDED, steps=3, total_steps=3, after=MEANS, policy=policy, learned=True))
    sink.close()


def _fails(sink: MetricSink) -> None:
    sink.start(RUN)
    sink.finish(RunSummary(status=RunPhase.FAILED, reason="[engine/no_engine_proved] none", total_steps=3))
    sink.close()


def _within(seconds: float, life: Callable[[], None], label: str) -> None:
    """Lives a sink's life in a thread of its own, as in a run."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            life()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=work, name="metric-sink", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{label}: the sink did not return within {seconds:g} s"
    if raised:
        raise raised[0]
