"""Every component of a job, the operator and the cluster's daemons killed at every moment of a job's life: the job
succeeds, and its ledger is complete."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from .cluster.client import Cluster, has_condition
from .cluster.commands import eventually
from .installation import JOB, Installation, at_step, condition, is_true, small, summary
from .killing import DAEMONS, VICTIMS, Killer, Moment, schedule

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(2400)]
SEED, ROUNDS = int(os.environ.get("KESTRL_KILL_SEED", "7")), int(os.environ.get("KESTRL_KILL_ROUNDS", "2"))
LAST_STEPS = 5
"""Steps after the suspension. Until then the job has no end, so that it cannot come before a kill."""
GROUPS = 4
"""Groups per step."""
FROZEN_SECONDS = 20.0
REPORT = os.environ.get("KESTRL_KILLED_REPORT", "")
"""A file for the report of kills and results."""


def volume_of(cluster: Cluster, job: str, namespace: str) -> Path:
    """The folder of the learner's volume on this machine."""
    claim = cluster.get("persistentvolumeclaim", f"state-{job}-learner-0", namespace)
    volume = cluster.get("persistentvolume", claim["spec"]["volumeName"])
    return Path(volume["spec"]["hostPath"]["path"])


def work(folder: Path, copy: Path) -> list[tuple[int, str, int | None, str | None]]:
    """The ledger's rows, read from a copy so that nothing writes into the original."""
    for path in folder.glob("ledger.db*"):
        shutil.copy(path, copy / path.name)
    with closing(sqlite3.connect(copy / "ledger.db")) as connection:
        return connection.execute("SELECT position, state, step, reason FROM work ORDER BY position").fetchall()


def test_a_job_whose_every_component_is_killed_loses_and_repeats_nothing(
    installation: Installation, daemons: Cluster, tmp_path: Path
) -> None:
    cluster, plan, began = installation.cluster, schedule(SEED, rounds=ROUNDS), time.monotonic()
    with installation.place() as namespace:
        killer = Killer(installation, "killed", namespace)
        cluster.apply(small("killed", schedule__maxSteps=100_000, schedule__epochs=1000), namespace)

        def step() -> int:
            found = installation.wait("killed", namespace, lambda _: True, 60)  # an API server may have just started
            return int(found["status"].get("progress", {}).get("step", 0))

        def one_more(since: int) -> None:
            installation.wait("killed", namespace, at_step(since + 1), 420)

        for kill in plan[Moment.STARTING]:
            killer.carry_out(kill)
        one_more(0)
        for kill in plan[Moment.TRAINING]:
            before = step()
            killer.carry_out(kill)
            one_more(before)
        for name in DAEMONS:
            before = step()
            cluster.node.kill(name)
            cluster.node.start(name)
            one_more(before)
        cluster.node.freeze("kube-apiserver")
        time.sleep(FROZEN_SECONDS)  # the outage itself is the test
        cluster.node.thaw("kube-apiserver")
        one_more(step())

        cut = installation.leader()
        (address,) = [pod["status"]["podIP"] for pod in installation.operators() if pod["metadata"]["name"] == cut]
        before = step()
        with cluster.node.cut_off(address):
            eventually("another operator leads", lambda: installation.leader() not in {"", cut}, 120)
            one_more(before)
        eventually(
            "the disconnected operator receives events again, or was restarted",
            lambda: [has_condition(pod, "Ready") for pod in installation.operators()] == [True, True],
            240,
        )

        cluster.patch(JOB, "killed", {"spec": {"suspend": True}}, namespace)
        for kill in plan[Moment.DRAINING]:
            killer.carry_out(kill, over=lambda: released(installation, namespace))
        suspended = installation.wait("killed", namespace, is_true("Suspended"), 420)
        steps = suspended["status"]["progress"]["step"] + LAST_STEPS
        cluster.patch(JOB, "killed", {"spec": {"suspend": False, "schedule": {"maxSteps": steps}}}, namespace)

        installation.wait("killed", namespace, at_step(steps - 1), 600)
        for kill in plan[Moment.ENDING]:
            killer.carry_out(kill, over=lambda: ended(installation, namespace))
        done = installation.wait("killed", namespace, is_true("Succeeded"), 600)

        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", steps)
        counts = killer.counts()
        assert set(counts["by victim"]) == set(VICTIMS)
        assert set(counts["by moment"]) == set(Moment)
        assert min(counts["by victim"].values()) >= 1 + ROUNDS

        rows = work(volume_of(cluster, "killed", namespace), tmp_path)
        assert [position for position, *_ in rows] == list(range(len(rows)))
        assert all(state in {"trained", "dropped"} for _, state, *_ in rows)
        assert all(reason for _, state, _, reason in rows if state == "dropped")
        trained = Counter(step for _, state, step, _ in rows if state == "trained")
        assert trained == dict.fromkeys(range(1, steps + 1), GROUPS)

        report = {
            "seed": SEED,
            "kills": len(killer.done),
            **counts,
            "daemons killed": list(DAEMONS),
            "steps": steps,
            "restarts that counted": done["status"].get("restarts", 0),
            "seconds": round(time.monotonic() - began),
            "failures": report["failures"],
            "scenarios dropped of those begun": len(
                [row for row in rows if row[1] == "dropped" and row[0] < GROUPS * steps]
            ),
        }
        if REPORT:
            Path(REPORT).write_text(json.dumps(report, indent=2) + "\n")


def released(installation: Installation, namespace: str) -> bool:
    """Whether the job's pods are released."""
    return condition(installation.job("killed", namespace), "Suspended")[0] == "True"


def ended(installation: Installation, namespace: str) -> bool:
    return condition(installation.job("killed", namespace), "Succeeded")[0] == "True"
