"""The rollouts of a step as they come in: sums and divisors, in words and as data."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from kestrl._app.local.view import PLAIN_SECONDS, LiveView, PlainView
from kestrl._shared.rpc.run_report import report_of, state_of
from kestrl.errors import EngineFailure, JudgeFailure
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.state import Activity, RunState
from kestrl.runstate.states import RunPhase
from kestrl_learner.progress.progress import Progress


def gathering() -> Gathering:
    whole = [
        {"reward": reward, "answer_correct": correct, "completion_tokens": 40.0}
        for reward, correct in ((1.25, 1.0), (-1.0, 0.0), (0.5, 0.0))
    ]
    made = Gathering(wanted=4).with_group([*whole, {"reward": 0.25, "sources": 2.0}], tokens=130, seconds=1.0)
    return made.with_failure("engine", seconds=1.5).with_failure("engine", seconds=2.0)


def test_each_metric_has_its_own_divisor_and_integers_are_exact():
    assert gathering().line() == (
        "rollouts 1/4 groups  4 episodes  2.00 episodes/s 65 tokens/s  failures engine 2  reward 1/4=0.250  "
        "answer_correct 1/3=0.333  sources 2/1=2.000  completion_tokens 120/3=40.000"
    )


def test_nothing_that_came_in_is_a_line_too():
    assert Gathering(wanted=8).line() == "rollouts 0/8 groups  0 episodes"


def test_it_is_kept_as_data_and_survives_the_wire():
    made = gathering()
    facts = json.loads(json.dumps(made.facts()))
    assert facts["metrics"]["answer_correct"] == {"sum": 1.0, "divisor": 3}
    assert facts["failures"] == {"engine": 2}
    report = report_of(RunState(gathering=made))
    assert state_of(report).gathering == made
    report.ClearField("state")
    assert state_of(report).gathering == made, "of a learner of an earlier version"


def test_the_live_view_has_the_line(capsys: pytest.CaptureFixture[str]):
    console = Console(force_terminal=True, width=300)
    with LiveView(console, "job") as view:
        view.update(RunState(activity=Activity(phase=RunPhase.TRAINING), gathering=gathering()), {})
    assert "reward 1/4=0.250" in capsys.readouterr().out


def test_plain_output_has_the_line_at_intervals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = [100.0]
    monkeypatch.setattr("kestrl._app.local.view.time.monotonic", lambda: clock[0])
    view = PlainView(Console(width=300))
    progress = RunState(activity=Activity(phase=RunPhase.TRAINING), gathering=gathering())
    for seconds in (0.0, 1.0, PLAIN_SECONDS, 1.0):
        clock[0] += seconds
        view.update(progress, {})
    assert capsys.readouterr().out.count("reward 1/4=0.250") == 1


def test_failures_are_counted_by_boundary_and_are_in_no_mean():
    progress = Progress(engines=1, episodes_per_step=4)
    progress.begin_gathering(2)
    progress.count_rollout_failure(EngineFailure("gone").failure())
    progress.count_rollout_failure(JudgeFailure("no").failure())
    assert progress.state.gathering.failures == {"engine": 1, "judge": 1}
    assert progress.state.gathering.episodes == 0
    assert progress.state.gathering.seconds > 0
    received = state_of(report_of(progress.state))
    assert received.gathering == progress.state.gathering
    assert sum(received.history.failures.values()) == 2
    progress.begin_gathering(2)
    assert progress.state.gathering.facts()["failures"] == {}
