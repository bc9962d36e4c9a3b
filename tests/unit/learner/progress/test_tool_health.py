"""A job whose tools are never called, or never work, is warned of in its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kestrl._app.local.runner_record import RunnerRecord
from kestrl._app.local.view import LiveView, PlainView
from kestrl._shared.rpc.run_report import report_of, state_of
from kestrl._shared.telemetry.names import Instrument, Metric
from kestrl.api.common.v1 import common_pb2
from kestrl.episode import CallOutcome, Group, Scenario
from kestrl.episode.codec import group_from_proto, group_to_proto
from kestrl.runstate.history import ToolCounts
from kestrl.runstate.state import Activity, RunState, Steps, ToolUse
from kestrl.runstate.states import RunPhase
from kestrl.testing.attempts import make_attempt, make_call
from kestrl.tools import SandboxInUse
from kestrl_learner.progress.metrics import observe_progress
from kestrl_learner.progress.progress import Progress
from kestrl_learner.progress.tool_health import Warn
from kestrl_learner.run import LearnerRun

OK, BROKEN = CallOutcome.OK, CallOutcome.INVALID_JSON
SILENT: tuple[str, list[CallOutcome]] = ("", [])


def group(*episodes: tuple[str, list[CallOutcome]], tools: list[str] | None = None, failed: int = 0) -> Group:
    """Scored episodes by the text of their last turn and the outcomes of their calls; `failed` have no reward."""
    made = [
        replace(
            make_attempt(text, calls=[make_call("search", outcome=outcome) for outcome in outcomes]).episode,
            reward=None if index < failed else 0.5,
        )
        for index, (text, outcomes) in enumerate(episodes)
    ]
    scenario = Scenario(id="a", ordinal=0, messages=[], tools=tools)
    return Group(id="g", scenario=scenario, episodes=made)


def progress(*groups: Group, offers_tools: bool = True) -> Progress:
    made = Progress(1, 4, offers_tools=offers_tools)
    for each in groups:
        made.add(each)
    return made


def test_no_call_in_a_steps_episodes_is_a_warning():
    silent = group(("Paris", []), ("Rome", []))
    assert progress(silent).state.tools.warning == "", "two of four episodes are too few"
    tools = progress(silent, silent).state.tools
    assert tools.warning_reason == "no_tool_call"
    assert tools.warning.startswith("none of the last 4 episodes called a tool, although tools were offered; see")


def test_calls_in_another_format_are_recognised():
    other = group(("<function=search>paris</function>", []), ("Rome", []))
    assert progress(other, other).state.tools.warning.endswith(
        "2 of them contain what looks like a call in a format that is not the job's (<function= in 2): check "
        "agent.toolCallFormat and the chat template"
    )


def test_calls_of_which_none_succeeds_are_a_warning_with_outcomes():
    failing = group(("", [BROKEN, BROKEN]), ("", [CallOutcome.UNKNOWN_TOOL]))
    tools = progress(failing, failing).state.tools
    assert tools.warning_reason == Warn.CALLS_FAILING
    assert "none of the 6 tool calls of the last 4 episodes succeeded (invalid_json 4, unknown_tool 2)" in (
        tools.warning
    )


def test_a_call_that_succeeds_ends_the_warning():
    made = progress(group(*[SILENT] * 4))
    assert made.state.tools.warning
    made.add(group(("", [OK])))
    assert (made.state.tools.warning, made.state.tools.warning_reason) == ("", "")


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(progress(group(*[SILENT] * 8), offers_tools=False), id="the job has no tools"),
        pytest.param(progress(group(*[SILENT] * 8, tools=[])), id="the row offers none"),
        pytest.param(progress(group(*[SILENT] * 8, failed=8)), id="the episodes failed"),
    ],
)
def test_episodes_without_tools_and_failed_ones_do_not_count(made: Progress):
    assert (made.state.tools.warning, made.state.history.tools) == ("", ToolCounts())


def test_metrics_have_calls_per_episode_shares_and_the_warning(monkeypatch: pytest.MonkeyPatch):
    observed: dict[Instrument, Callable[[], Any]] = {}
    monkeypatch.setattr("kestrl_learner.progress.metrics.observe", observed.__setitem__)
    made = progress(group(("", [OK, BROKEN]), ("", []), ("", [OK, OK]), ("", [])))
    observe_progress(made)
    assert observed[Metric.TOOL_CALLS_PER_EPISODE]() == 1.0
    shares = observed[Metric.TOOL_OUTCOME_SHARE]()
    assert (shares["ok"], shares["invalid_json"], shares["truncated"]) == (0.75, 0.25, 0.0)
    assert observed[Metric.TOOL_WARNING]() == {}
    made.add(group(*[SILENT] * 4))
    assert observed[Metric.TOOL_WARNING]() == {"no_tool_call": 1.0}
    assert observed[Metric.TOOL_OUTCOME_SHARE]() == {}


def test_the_line_of_rollouts_has_calls_per_episode():
    quiet = group(("Paris", []), ("Rome", []))
    episodes = [replace(episode, metrics={"tool_calls": 3.0, "sources": 1.0}) for episode in quiet.episodes]
    made = progress(replace(quiet, episodes=episodes))
    line = made.state.gathering.line()
    assert "tool_calls 6/2=3.000" in line
    assert line.index("tool_calls") < line.index("sources")


def test_the_warning_is_shown_once_until_calls_work_again():
    warned = RunState(
        activity=Activity(phase=RunPhase.TRAINING),
        steps=Steps(done=1, total=9),
        tools=ToolUse(warning="none of the [4] called"),
    )
    shown = StringIO()
    plain = PlainView(Console(file=shown, width=200))
    for each in (warned, warned.but(steps=Steps(done=2, total=9)), warned.but(tools=ToolUse()), warned):
        plain.update(each, {})
    assert shown.getvalue().count("warning: tools: none of the [4] called") == 2
    console = Console(file=StringIO(), width=80, record=True)
    view = LiveView(console, "job")
    view.update(warned, {})
    console.print(view._draw())
    assert "tools: none of the [4] called" in console.export_text()


async def test_a_run_without_calls_warns_in_its_first_step_and_summary(staged: Any) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.but(max_steps=1, tools=True))
        await run.main()
        assert report_of(run.progress.state).tool_warning_reason == "no_tool_call"
        assert stage.summary["tool_warning"]["reason"] == "no_tool_call"
        assert stage.summary["tools"]["calls_per_episode"] == 0.0


async def test_calls_before_a_resume_are_in_the_summary(staged: Any) -> None:
    def calling(_: Any, made: Group) -> Group:
        episodes = [replace(episode, tool_calls=[make_call("search")]) for episode in made.episodes]
        return group_from_proto(group_to_proto(replace(made, episodes=episodes)))

    async with staged() as stage:
        for worker in stage.workers:
            worker.script = calling
        await LearnerRun(stage.but(max_steps=1, tools=True)).main()
        before = stage.summary["tools"]
        assert before["calls"] == before["episodes"] > 0
        assert stage.summary["tool_warning"] is None
        await LearnerRun(stage.but(max_steps=2, tools=True)).main()
        after = stage.summary["tools"]
        assert after["calls"] == after["outcomes"]["ok"] > before["calls"]


async def test_the_sandboxes_of_tools_are_in_progress_record_and_summary(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].sandboxes = {"code": common_pb2.SandboxInUse(backend="zygote", isolation="namespaces")}
        run = LearnerRun(stage.but(max_steps=1, tools=True))
        await run.main()
        used = {"code": {"backend": "zygote", "isolation": "namespaces"}}
        assert stage.summary["sandboxes"] == used
        received = state_of(report_of(run.progress.state))
        assert RunnerRecord(state=received).to_json()["state"]["tools"]["sandboxes"] == used


def test_a_worker_that_knows_no_sandbox_yet_takes_none_away() -> None:
    made = progress()
    made.report_sandboxes({"code": SandboxInUse(backend="zygote", isolation="namespaces")})
    made.report_sandboxes({})
    assert made.state.tools.sandboxes["code"].backend == "zygote"
    made.report_sandboxes({"code": SandboxInUse(backend="bwrap", isolation="namespaces")})
    assert made.state.tools.sandboxes["code"].backend == "bwrap"
