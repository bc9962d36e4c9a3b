"""Engines of a real run that are lost at once, as on spot nodes, and one that leaves in order."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from kestrl._app.local.rundir import RunDir
from kestrl.runstate.state import RunState

from .runs import QUICKSTART, ROOT, SMALL, command, eventually, kestrl, wait_for_step

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.share(3)]


def state_of(run: RunDir) -> RunState:
    record = run.record()
    return RunState() if record is None or record.state is None else record.state


def proved(run: RunDir, engines: int) -> None:
    """Waits until a run has a number of engines that have all proved the newest version."""
    eventually(lambda: (fleet := state_of(run).engines).verified == fleet.total == engines, 240)


def pid_of(run: RunDir, component: str) -> int:
    record = run.record()
    return 0 if record is None or component not in record.components else record.components[component].pid


def test_half_of_the_engines_lost_three_times_costs_no_scenario(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "email-search-1")
    settings = ("--set", "inference.replicas=2", "--set", "schedule.maxSteps=400", "--set", "data.train.size=1000")
    arguments = command("run", QUICKSTART, "--runs", tmp_path, *SMALL, *settings)
    with subprocess.Popen(arguments, cwd=ROOT, text=True, env=os.environ) as process:
        wait_for_step(run, process, 1)
        for name in ("engine-0", "engine-1", "engine-0"):
            proved(run, 2)
            before, pid = state_of(run).steps.done, pid_of(run, name)
            wait_for_step(run, process, before + 1)  # the next step has begun
            os.kill(pid, signal.SIGKILL)
            wait_for_step(run, process, before + 3)  # steps go on with the other
            eventually(lambda name=name, pid=pid: pid_of(run, name) not in {0, pid}, 60)
        proved(run, 2)
        kestrl("scale", run.id, "engines=1", "--runs", tmp_path)
        eventually(lambda: pid_of(run, "engine-1") == 0, 120)
        proved(run, 1)
        wait_for_step(run, process, state_of(run).steps.done + 1)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    log = (run.path / "logs" / "inference-1.log").read_text()
    assert "drains: it takes no further turn" in log
    assert ", 0 requests are left" in log, "it ended when its turns were over"
    state = state_of(run)
    assert not [failure for failure in state.history.failures if failure.startswith("policy/")]
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        trained = connection.execute("SELECT step, count(*) FROM work WHERE state = 'trained' GROUP BY step").fetchall()
        failed = connection.execute("SELECT count(*) FROM work WHERE state = 'dropped' OR failures > 0").fetchone()
    assert trained == [(step, 2) for step in range(1, state.steps.done + 1)], "each scenario has one row"
    assert failed == (0,)
