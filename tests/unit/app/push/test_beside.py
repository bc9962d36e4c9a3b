"""`telemetry.mlflow`: the program beside a run, its reports, and that it ends with the run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.fakes.stored_runs import make_stored_run
from tests.program import run_program

from kestrl._app.local.rundir import RunDir
from kestrl._app.local.runner_record import RunnerRecord, RunnerRecordFile
from kestrl._app.push import beside
from kestrl._app.push.beside import MLflowFollower
from kestrl._shared.spec.job import MLflowTracking
from kestrl.errors import UserInputError

DOWN = "http://127.0.0.1:9"
"""The port of the protocol Discard, where nothing listens."""


class Reports:
    """What is reported."""

    def __init__(self) -> None:
        self.words: list[tuple[str, bool]] = []
        self._more = asyncio.Event()

    def add(self, words: str, problem: bool) -> None:
        self.words.append((words, problem))
        self._more.set()

    async def problem(self) -> str:
        """The next report of a problem."""
        while True:
            await self._more.wait()
            self._more.clear()
            if self.words[-1][1]:
                return self.words[-1][0]


def follower(uri: str = DOWN, credentials: Mapping[str, str] | None = None) -> MLflowFollower:
    return MLflowFollower(
        MLflowTracking(uri=uri, experiment="a b", sample=0.5), lambda: credentials or {}, Path("/manifest")
    )


async def test_a_server_that_is_down_is_waited_for_until_the_run_ends(tmp_path: Path) -> None:
    folder = make_stored_run(tmp_path / "runs" / "job-1")
    (folder / "logs").mkdir()
    run, reports = RunDir(folder), Reports()
    assert run.lock() is not None
    following = asyncio.create_task(follower().follow(run, reports.add))
    assert (await reports.problem()).startswith(f"waiting: MLflow at {DOWN} does not answer")
    assert reports.words[0] == (f"sends to {DOWN}", False)
    assert not following.done()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    reports.words.clear()
    await follower().finish(run, reports.add)
    ((words, problem),) = reports.words
    assert problem
    assert f"MLflow at {DOWN} does not answer" in words
    assert f"send it: kestrl push job-1 --runs {folder.parent} --to mlflow --uri {DOWN} --experiment 'a b'" in words
    assert "waiting: " in (folder / "logs" / "mlflow.log").read_text()


async def test_the_end_of_a_run_waits_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "endless.py"
    program.write_text("import signal, sys\nprint('hello', flush=True)\nsignal.pause()\n")
    monkeypatch.setattr(beside, "PROGRAM", program.stem)
    monkeypatch.setattr(beside, "FINISH_SECONDS", 0.05)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = make_stored_run(tmp_path / "runs" / "job-1")
    (folder / "logs").mkdir()
    reports = Reports()
    await follower().finish(RunDir(folder), reports.add)
    ((words, problem),) = reports.words
    assert problem
    assert words.startswith("no end within 0.05 s; not everything was sent; send it: kestrl push job-1 ")


async def test_a_database_is_beside_the_manifest_and_credentials_are_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "shows.py"
    program.write_text("import os, sys\nprint(os.environ['MLFLOW_TRACKING_TOKEN'], *sys.argv[1:])\nsys.exit(1)\n")
    monkeypatch.setattr(beside, "PROGRAM", program.stem)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = make_stored_run(tmp_path / "runs" / "job-1")
    (folder / "logs").mkdir()
    reports = Reports()
    sent = follower("sqlite:///tracking/mlflow.db", {"MLFLOW_TRACKING_TOKEN": "a-token"})
    await sent.finish(RunDir(folder), reports.add)
    ((words, _),) = reports.words
    assert words.startswith(
        f"a-token push job-1 --runs {folder.parent} --to mlflow --uri sqlite:////manifest/tracking/"
    )


def test_a_job_whose_secret_is_missing_is_refused_before_it_starts(tmp_path: Path) -> None:
    rows = [{"id": number, "question": f"{number}?", "ground_truth": number} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "sent"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
            "telemetry": {"mlflow": {"uri": DOWN, "secretRef": {"name": "tracking"}}},
        },
    }
    (tmp_path / "job.json").write_text(json.dumps(manifest))
    done = run_program("run", tmp_path / "job.json", "--runs", tmp_path / "runs", env=dict(os.environ))
    assert done.returncode == 2
    missing = f"spec.telemetry.mlflow.secretRef: {tmp_path / 'tracking.env'} does not exist"
    assert missing in done.stdout + done.stderr
    assert not list((tmp_path / "runs").glob("sent-*"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "PACKAGES", ("httpx2", "no_such_package"))
    with pytest.raises(UserInputError, match=r"mlflow needs no_such_package: pip install 'kestrl\[push\]'"):
        follower()


def test_status_shows_what_became_of_the_run_at_the_server(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kestrl._app.cli.main import app

    folder = make_stored_run(tmp_path / "runs" / "job-1")
    record = RunnerRecordFile(folder / "run.json", RunnerRecord(run="job-1"))
    record.update(force=True, followers={"mlflow": "waiting: it is down"})
    shown = CliRunner().invoke(app, ["status", "job-1", "--runs", str(folder.parent)])
    assert shown.exit_code == 0, shown.output
    assert "mlflow: waiting: it is down" in shown.output
