"""Every component killed at every phase, again and again: the run ends, and nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kestrl._app.local.rundir import RunDir

from .process_killer import COMPONENTS, TRAINING, Killer, Moment, schedule
from .runs import QUICKSTART, ROOT, SMALL, belonging_to, command, eventually, kestrl, summary_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]
ROUNDS = int(os.environ.get("KESTRL_KILL_ROUNDS", "2"))
"""How often each component is killed during training; three times more at the start and the evaluations."""
REPORT = os.environ.get("KESTRL_SOAK_REPORT", "")
"""A file for what was done and seen."""
STEPS = 12 * ROUNDS
SEED = 7
LEARNT = 1e-3
"""What each of lora_B's matrices, which are zero at first, has at least somewhere: adapters that learnt nothing would
be equal, too."""


def arguments(runs: Path) -> list[str | Path]:
    more = (
        "inference.replicas=1",
        "data.validation.size=24",
        f"schedule.maxSteps={STEPS}",
        "schedule.checkpointEvery=2",
    )
    return ["run", QUICKSTART, "--runs", runs, *SMALL, *(flag for item in more for flag in ("--set", item))]


def work(run: RunDir) -> list[tuple[int, str, int | None, str | None]]:
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        return connection.execute("SELECT position, state, step, reason FROM work ORDER BY position").fetchall()


def adapter(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(Path(summary_of(run)["policy"]["uri"].removeprefix("file://")) / "adapter_model.safetensors")


def killed_run(runs: Path) -> tuple[RunDir, Killer, int]:
    """The run to its end under the killer, by the same command again and again; how often that was given."""
    run = RunDir(runs / "email-search-1")
    killer = Killer(run, schedule(SEED, rounds=ROUNDS))
    for commands in range(1, 40):
        with subprocess.Popen(command(*arguments(runs)), cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
            while killer.next(lambda: process.poll() is None, process.pid) is not None:
                if process.poll() is not None:
                    break
            printed = process.communicate()[0]
        eventually(lambda: belonging_to(runs) == [], 60)
        if process.returncode == 0:
            return run, killer, commands
        assert process.returncode in {-9, 1}, printed
    raise AssertionError(f"it never ended; killed {killer.counts()}")


def test_a_run_with_every_component_killed_in_every_phase_loses_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    run, killer, commands = killed_run(tmp_path / "killed")
    seconds = time.monotonic() - began

    counts = killer.counts()
    assert killer.kills == []
    assert len(killer.done) == (3 + ROUNDS) * len(COMPONENTS)
    assert set(counts) == set(COMPONENTS)
    moments = Counter(kill.moment for kill in killer.done)
    assert moments.keys() >= {Moment.STARTING, Moment.BEFORE, Moment.AFTER}
    assert sum(moments[moment] for moment in (*TRAINING, Moment.ANY)) >= ROUNDS * len(COMPONENTS)
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("succeeded", STEPS)

    rows = work(run)
    assert [position for position, *_ in rows] == list(range(4000))
    assert all(state in {"trained", "dropped"} for _, state, *_ in rows)
    assert all(reason for _, state, _, reason in rows if state == "dropped")
    assert Counter(step for _, state, step, _ in rows if state == "trained") == dict.fromkeys(range(1, STEPS + 1), 2)

    kestrl(*arguments(tmp_path / "whole"), timeout=600)
    whole = RunDir(tmp_path / "whole" / "email-search-1")
    ours, theirs = adapter(run), adapter(whole)
    lost = [row for row in rows if row[1] == "dropped" and row[0] < 2 * STEPS]
    gap = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert min(float(weight.abs().max()) for name, weight in theirs.items() if "lora_B" in name) > LEARNT
    report = {
        "kills": len(killer.done),
        "by component": dict(counts),
        "by moment": {str(moment): count for moment, count in moments.items()},
        "commands": commands,
        "seconds": round(seconds),
        "seconds unkilled": round(summary_of(whole)["seconds"]),
        "failures": summary["failures"],
        "scenarios dropped": len(lost),
        "largest difference of the adapter from the unkilled run's": gap,
    }
    if REPORT:
        Path(REPORT).write_text(json.dumps(report, indent=2) + "\n")
    # A scenario that is dropped is trained on by one run and not by the other; else the same tokens are sampled again.
    assert lost or gap <= 1e-5
