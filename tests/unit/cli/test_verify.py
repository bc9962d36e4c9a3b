"""`kestrl verify` on runs that have finished; the runs themselves are stood in for by what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kestrl.cli.main import app
from kestrl.errors import UserInputError
from kestrl.spec import read_job
from kestrl.spec.threshold import read_threshold

ROOT = Path(__file__).parents[3]
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
    assert "mean 0.525, threshold 0.5" in printed
    assert "published: 0.6 (two cores); docs/results.md" in printed
    assert "passed" in printed
    verdict = json.loads((threshold.parent / "runs" / "verify" / "mail.json").read_text())
    assert verdict["passed"] is True
    assert [seed["values"] for seed in verdict["seeds"]] == [[0.5, 0.6], [0.4, 0.6]]


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


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_has_not_succeeded_is_not_judged(threshold: Path, status: str) -> None:
    error, message = verify(threshold, "--run", finish(threshold, 1, 0.2, 0.9, 0.9, status=status))
    assert isinstance(error, UserInputError)
    assert "has not succeeded" in message


def test_a_job_without_evaluations_is_refused_before_it_runs(threshold: Path) -> None:
    error, message = verify(threshold, "--set", "schedule.evalEvery=null")
    assert isinstance(error, UserInputError)
    assert "spec.schedule.evalEvery: must be set in job.yaml" in message
    assert not (threshold.parent / "runs").exists()


@pytest.mark.parametrize("path", THRESHOLDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_shipped_thresholds_name_jobs_that_evaluate(path: Path) -> None:
    spec = read_threshold(path).spec
    job = read_job(path.parent / spec.job).spec
    assert job.schedule.eval_every is not None
    assert job.data.validation is not None
    if spec.sft is not None:
        assert (path.parent / spec.sft).is_file()
