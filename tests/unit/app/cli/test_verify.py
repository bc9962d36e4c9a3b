"""`kestrl verify` on runs that have finished; the runs themselves are stood in for by what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.local.rundir import RunDir
from kestrl._shared.spec import AgentRLJob, parse_job, read_job
from kestrl._shared.spec.threshold import read_threshold
from kestrl.errors import UserInputError

ROOT = Path(__file__).parents[4]
THRESHOLDS = sorted(ROOT.glob("examples/*/*threshold*.yaml"))


@pytest.fixture
def threshold(tmp_path: Path) -> Path:
    """A threshold of 0.5 for two seeds of the quickstart."""
    job = yaml.safe_load((ROOT / "examples/email-search/quickstart.yaml").read_text())
    job["spec"]["schedule"]["evalEvery"] = 5
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    spec = {
        "job": "job.yaml",
        "metric": "answer_correct",
        "threshold": 0.5,
        "plateau": {"evaluations": 2},
        "seeds": [1, 2],
        "template": "its own",
        "published": {"value": 0.6, "setting": "two cores", "source": "docs/results.md"},
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "Threshold", "metadata": {"name": "mail"}, "spec": spec}
    path = tmp_path / "threshold.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def finish(
    threshold: Path, seed: int, *values: float, status: str = "succeeded", overrides: tuple[str, ...] = ()
) -> str:
    """Writes what a finished run of a seed leaves; returns its id."""
    name = f"email-search-seed-{seed}"
    job = read_job(threshold.parent / "job.yaml", [f"data.seed={seed}", f"metadata.name={name}", *overrides])
    folder = threshold.parent / "runs" / f"{name}-1"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
    points = [{"step": 5 * index, "answer_correct": value, "episodes": 120.0} for index, value in enumerate(values)]
    (folder / "summary.json").write_text(json.dumps({"status": status, "evaluations": points}))
    return folder.name


def verify(threshold: Path, *arguments: str) -> tuple[Any, str]:
    done = CliRunner().invoke(app, ["verify", str(threshold), "--runs", str(threshold.parent / "runs"), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return done.exception, str(done.exception)
    return done.exit_code, " ".join(done.output.split())


def test_finished_seeds_are_judged_without_being_run_again(threshold: Path) -> None:
    finish(threshold, 1, 0.2, 0.5, 0.6)
    finish(threshold, 2, 0.2, 0.4, 0.6)
    code, printed = verify(threshold)
    assert code == 0
    assert "email-search-seed-1-1 has finished" in printed
    assert "mean 0.525 ±0.025, threshold 0.5" in printed
    assert "published: 0.6 (two cores); docs/results.md" in printed
    assert "passed" in printed
    verdict = json.loads((threshold.parent / "runs" / "verify" / "mail.json").read_text())
    assert verdict["passed"] is True
    assert [seed["values"] for seed in verdict["seeds"]] == [[0.5, 0.6], [0.4, 0.6]]


@pytest.fixture
def started(threshold: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """Runs that were started, each with its seed and whether it was resumed; every one succeeds at once."""
    runs: list[tuple[str, int, bool]] = []

    def run_job(job: AgentRLJob, run: RunDir, _options: Any, _console: Any, *, resumed: bool) -> int:
        runs.append((run.id, job.spec.data.seed, resumed))
        run.path.mkdir(parents=True, exist_ok=True)
        (run.path / "job.json").write_text(job.model_dump_json(by_alias=True))
        points = [{"step": step, "answer_correct": 0.1 * step, "episodes": 120.0} for step in (0, 5, 10)]
        run.summary_path.write_text(json.dumps({"status": "succeeded", "evaluations": points}))
        return 0

    monkeypatch.setattr("kestrl._app.cli.verify.run_job", run_job)
    return runs


def test_an_interrupted_seed_is_resumed_and_a_missing_one_started(threshold: Path, started: list[Any]) -> None:
    finish(threshold, 1, 0.2, status="suspended")
    assert verify(threshold)[0] == 0
    assert started == [("email-search-seed-1-1", 1, True), ("email-search-seed-2-1", 2, False)]
    assert verify(threshold)[0] == 0
    assert len(started) == 2, "both have finished"
    assert verify(threshold, "--new")[0] == 0
    assert started[2:] == [("email-search-seed-1-2", 1, False), ("email-search-seed-2-2", 2, False)]


def test_a_finished_run_of_another_schedule_is_not_judged(threshold: Path, started: list[Any]) -> None:
    finish(threshold, 1, 0.2, 0.9, 0.9, overrides=("schedule.maxSteps=2",))
    verify(threshold)
    assert [run for run, _, _ in started] == ["email-search-seed-1-2", "email-search-seed-2-1"]


def test_the_exit_code_of_an_interrupted_run_is_passed_on(threshold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl._app.cli.verify.run_job", lambda *_, **__: 130)
    code, _ = verify(threshold)
    assert code == 130
    assert not (threshold.parent / "runs" / "verify").exists()


@pytest.mark.parametrize("field", ["model.adapter.from", "model.base"])
def test_the_job_starts_from_the_result_of_sft(
    threshold: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    document = yaml.safe_load(threshold.read_text())
    document["spec"] |= {"sft": "sft.yaml", "seeds": [3]}
    threshold.write_text(yaml.safe_dump(document))
    monkeypatch.setattr("kestrl._app.cli.verify.fine_tuned", lambda path, *_: f"{field}=file:///{path.name}/a")
    assert verify(threshold)[0] == 0
    job = parse_job(json.loads((threshold.parent / "runs" / started[0][0] / "job.json").read_text()))
    found = job.spec.model.base if field == "model.base" else job.spec.model.adapter.from_
    assert found == "file:///sft.yaml/a"


def test_a_threshold_that_is_not_reached_exits_with_1(threshold: Path) -> None:
    finish(threshold, 1, 0.2, 0.5, 0.6)
    finish(threshold, 2, 0.2, 0.2, 0.2)
    code, printed = verify(threshold)
    assert code == 1
    assert "problem: the mean plateau of answer_correct is 0.3750, below 0.5" in printed
    assert json.loads((threshold.parent / "runs" / "verify" / "mail.json").read_text())["passed"] is False


def test_an_existing_run_is_judged_by_its_id(threshold: Path) -> None:
    code, printed = verify(threshold, "--run", finish(threshold, 7, 0.2, 0.7, 0.7))
    assert code == 0
    assert "warning" not in printed


def test_a_run_of_another_job_is_judged_with_a_warning(threshold: Path) -> None:
    run = finish(threshold, 7, 0.2, 0.7, 0.7, overrides=("rewards=[{rule: format}]",))
    _, printed = verify(threshold, "--run", run)
    assert f"warning: {run} differs from the threshold's job in spec.rewards" in printed


@pytest.mark.parametrize("status", ["failed", "suspended"])
def test_a_run_that_has_not_succeeded_is_not_judged(threshold: Path, status: str) -> None:
    error, message = verify(threshold, "--run", finish(threshold, 1, 0.2, 0.9, 0.9, status=status))
    assert isinstance(error, UserInputError)
    assert "has not succeeded" in message


def test_a_job_without_evaluations_is_refused_before_it_runs(threshold: Path) -> None:
    error, message = verify(threshold, "--set", "schedule.evalEvery=null")
    assert isinstance(error, UserInputError)
    assert "job.yaml: spec.schedule.evalEvery: must be set" in message
    assert not (threshold.parent / "runs").exists()


@pytest.mark.parametrize("path", THRESHOLDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_shipped_thresholds_name_jobs_that_evaluate(path: Path) -> None:
    spec = read_threshold(path).spec
    job = read_job(path.parent / spec.job).spec
    assert job.schedule.eval_every is not None
    assert job.data.validation is not None
    if spec.sft is not None:
        assert (path.parent / spec.sft).is_file()
