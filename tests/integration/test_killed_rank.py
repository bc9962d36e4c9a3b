"""A run whose learner computes on two ranks, with real engines; one rank is killed in the middle."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from kestrl._app.local.rundir import RunDir

from .runs import QUICKSTART, ROOT, SMALL, belonging_to, command, eventually, summary_of, wait_for_step

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.share]
STEPS = 6


def rank_of(runs: Path) -> int:
    """The process id of rank 1 of the run in a folder; 0 while there is none."""
    for process in Path("/proc").iterdir():
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            place = (process / "cwd").readlink()
        except (OSError, ProcessLookupError):
            continue
        if b"kestrl_learner.rank" in arguments and place.is_relative_to(runs):
            return int(process.name)
    return 0


def test_a_rank_killed_in_the_middle_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "email-search-1")
    more = ("inference.replicas=1", "learner.accelerator.count=2", f"schedule.maxSteps={STEPS}")
    flags = [flag for item in more for flag in ("--set", item)]
    with subprocess.Popen(
        command("run", QUICKSTART, "--runs", tmp_path, *SMALL, *flags), cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        wait_for_step(run, process, 2)
        killed = rank_of(tmp_path)
        os.kill(killed, signal.SIGKILL)
        printed = process.communicate(timeout=400)[0]
    assert process.returncode == 0, printed
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("succeeded", STEPS)
    assert summary["logprob_gap"]["worst"] <= 1e-3
    log = (run.path / "logs" / "learner-0.log").read_text()
    assert "rank 1 was ended by signal 9" in log
    assert "resumed at step" in log
    record = run.read_json("run.json")
    assert record is not None
    assert record["components"]["learner-0"]["restarts"] == 1
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        rows = connection.execute("SELECT state, step FROM work").fetchall()
    assert Counter(step for state, step in rows if state == "trained") == dict.fromkeys(range(1, STEPS + 1), 2)
    eventually(lambda: belonging_to(tmp_path) == [], 60)
