"""What a refused command leaves behind, and what is said of a run that never learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.app.cli.test_front_door import MANIFEST, kestrl

from kestrl._app.local.rundir import RunDir, make_folders
from kestrl._shared.spec import parse_job
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS, digest

REFUSED: dict[str, Any] = {
    **MANIFEST,
    "spec": {
        **MANIFEST["spec"],
        "model": {"base": "demo://tiny"},
        "rewards": [{"rule": "nosuch:reward"}],
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(REFUSED))
    rows = ({"id": number, "question": f"{number}?", "ground_truth": str(number)} for number in range(8))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_refused_run_leaves_nothing_behind(project: Path) -> None:
    before = sorted(project.iterdir())
    ended = kestrl(project, "run", "job.yaml")
    assert (ended.returncode, "cannot import 'nosuch'" in ended.stderr) == (2, True), ended.stderr
    assert sorted(project.iterdir()) == before


def test_a_refused_run_leaves_other_runs_alone(project: Path) -> None:
    run = RunDir(project / "runs" / "other-1")
    make_folders(run, parse_job(MANIFEST), project)
    assert kestrl(project, "run", "job.yaml", "--set", "inference.accelerator.profile=nvidia").returncode == 2
    assert [path.name for path in (project / "runs").iterdir()] == ["other-1"]


def test_a_refused_resumption_keeps_the_run(project: Path) -> None:
    run = RunDir(project / "runs" / "job-1")
    make_folders(run, parse_job(REFUSED), project)
    assert kestrl(project, "run", "job.yaml").returncode == 2
    assert (run.path / "job.json").is_file()


def test_an_sft_run_without_its_devices_leaves_nothing_behind(project: Path) -> None:
    spec = {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "train.jsonl"}}, "learner": {"device": "npu"}}
    (project / "sft.yaml").write_text(yaml.safe_dump({**MANIFEST, "kind": "SFTJob", "spec": spec}))
    before = sorted(project.iterdir())
    assert kestrl(project, "sft", "sft.yaml").returncode == 2
    assert sorted(project.iterdir()) == before


@pytest.fixture
def unlearned(project: Path) -> RunDir:
    run = RunDir(project / "runs" / "job-1")
    make_folders(run, parse_job(MANIFEST), project)
    return run


def test_a_run_that_never_published_has_nothing_to_export(unlearned: RunDir, project: Path) -> None:
    ended = kestrl(project, "export", "--out", "adapter")
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: job-1 has learned nothing: there is no published adapter; start it again, or name another run\n",
    )


def test_an_export_of_the_first_version_says_that_it_has_learned_nothing(unlearned: RunDir, project: Path) -> None:
    publish(unlearned)
    ended = kestrl(project, "export", "--out", "adapter")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith(
        "warning: job-1 has learned nothing by step 0: this is the adapter that it began with"
    )
    missing = kestrl(project, "export", "--out", "other", "--step", "3")
    assert missing.stderr == "error: job-1 has no published adapter of step 3 (there are: 0)\n"


def publish(run: RunDir) -> None:
    files = {WEIGHTS: b"weights", "adapter_config.json": b"{}"}
    manifest = AdapterManifest(
        job="job",
        step=0,
        sha256=digest(b"weights"),
        files={name: digest(content) for name, content in files.items()},
        base_model="/m",
        rank=8,
        alpha=16,
        targets=("q_proj",),
        parent=None,
        probe=Probe(token_ids=(1,), logprobs=(), base_logprobs=()),
    )
    publish_adapter(open_store(str(run.path)), files, manifest)
