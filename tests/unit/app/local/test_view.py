"""What `kestrl run` shows while it trains: a panel drawn by the clock, and lines that stay."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.stored_runs import make_group, make_run, make_stored_run, store_step
from typer.testing import CliRunner

from kestrl._app.cli import runs as commands
from kestrl._app.cli.main import app
from kestrl._app.episodes.newest import newest_verdict
from kestrl._app.local import view as views
from kestrl._app.local.progress import BARS, sparkline
from kestrl._app.local.rundir import RECORD
from kestrl._app.local.runner_record import ComponentRecord, RunnerRecord
from kestrl._app.local.supervisor import ObservedChild
from kestrl._app.local.view import START_SECONDS, LiveView, PlainView
from kestrl._shared.plan.components import Component, Role
from kestrl.runstate.state import Activity, RunState, Steps
from kestrl.runstate.states import ComponentState, RunPhase
from kestrl.storage import open_store


def training(done: int, reward: float) -> RunState:
    means = {"reward": reward}
    return RunState(activity=Activity(phase=RunPhase.TRAINING), steps=Steps(done=done, total=9), means=means)


def drawn(view: LiveView) -> str:
    console = Console(file=StringIO(), width=80, record=True)
    console.print(view._draw())
    return console.export_text()


def test_the_panel_is_drawn_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(views.time, "monotonic", lambda: clock[0])
    view = LiveView(Console(file=StringIO(), force_terminal=True, width=80), "job")
    view.update(training(1, 0.5), {})
    assert "training step 1/9   0:00" in drawn(view)
    clock[0] += 52.0  # no report of the learner comes
    assert "training step 1/9   0:52" in drawn(view)
    assert "0:52 elapsed" in drawn(view)
    view.update(training(2, 0.5), {})
    assert "training step 2/9   0:00" in drawn(view)


def test_a_line_for_each_step_stays_above_the_panel() -> None:
    file = StringIO()
    with LiveView(Console(file=file, force_terminal=True, width=80), "job") as view:
        for done, reward in ((0, 0.0), (1, 0.125), (1, 0.125), (2, 0.5)):
            view.update(training(done, reward), {})
        panel = drawn(view)
    lines = re.findall(r"training step (\d/9) \| reward ([\d.]+)", file.getvalue())
    assert lines == [("1/9", "0.125"), ("2/9", "0.500")]
    assert f"reward {BARS[0]}{BARS[-1]} last 2 steps" in panel


def test_the_panel_has_the_last_episodes_verdict(tmp_path: Path) -> None:
    run = make_run(tmp_path / "job-1")
    store_step(run, 1, [make_group("g1")], {})
    store = open_store(str(run))
    view = LiveView(Console(file=StringIO(), width=200), "job", lambda: newest_verdict(store))
    view.update(training(0, 0.0), {})
    view.update(training(1, 0.5), {})
    view._reading.join(20)
    assert "last episode g1/1: no reward, tool/tool_raised, the shelf is locked" in " ".join(drawn(view).split())
    (run / "episodes/train/step=000001.parquet").write_bytes(b"PAR1")
    assert "is damaged" in newest_verdict(store)
    assert newest_verdict(open_store(str(make_run(tmp_path / "empty")))) == ""


@pytest.mark.parametrize(
    ("numbers", "shown"), [([], ""), ([1.0], "▅"), ([2.0, 2.0], "▅▅"), ([0.0, 1.0, 0.5], "▁█▅")], ids=str
)
def test_a_sparkline_spans_the_numbers(numbers: list[float], shown: str) -> None:
    assert sparkline(numbers) == shown


def test_a_long_start_repeats_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(views.time, "monotonic", lambda: clock[0])
    file = StringIO()
    view = PlainView(Console(file=file, width=200))
    engine = ObservedChild(Component(name="engine-0", role=Role.ENGINE, module="engine"))
    for _ in range(10):
        view.update(RunState(), {"engine-0": engine})
        clock[0] += START_SECONDS / 4
    lines = file.getvalue().splitlines()
    assert lines == [
        "starting", "starting for 1:00, waiting for engine-0", "starting for 2:00, waiting for engine-0",
    ]  # fmt: skip


def status(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(commands, "console", Console(width=80))
    result = CliRunner().invoke(app, ["status", run.name, "--runs", str(run.parent)])
    assert result.exception is None
    return result.stdout.splitlines()


def test_status_of_a_finished_run_has_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_stored_run(tmp_path / "runs" / "job-1")
    assert "held-out questions, before -> after: reward 0.125 -> 0.500" in status(run, monkeypatch)


def test_status_fits_eighty_columns_with_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs" / "job-1")
    names = ["learner-0", "rollout-0", "tools-0", "judge-0", "inference-0", "engine-0"]
    error = "the engine was killed by the kernel, which had no memory left for it: see its log"
    components = {
        name: ComponentRecord(
            role=Role.ENGINE, state=ComponentState.RUNNING, pid=4_194_304, ports={"metrics": 65_000},
            devices=("0", "1"), restarts=2, last_exit=137, last_error=error,
        )
        for name in names
    }  # fmt: skip
    (run / RECORD).write_text(RunnerRecord(run="job-1", job="job", components=components).text())
    lines = status(run, monkeypatch)
    table = [line for line in lines if "│" in line or "┃" in line]
    assert all(len(line) <= 80 for line in table)
    assert "…" not in "".join(lines)
    for name in (*names, "component", "restarts", "devices", "gone"):
        assert any(name in line.replace("┃", " ").replace("│", " ").split() for line in table), name
    assert f"engine-0: {error}" in lines
