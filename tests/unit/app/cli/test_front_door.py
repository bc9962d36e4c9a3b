"""Commands as a person types them: in the run's own folder, with default flags, in paths with odd characters."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.program import run_program

from kestrl._app.error_text import VARIABLE as ERRORS
from kestrl._app.local.rundir import RunDir, make_folders
from kestrl._app.local.runner_record import RunnerRecord, RunnerRecordFile
from kestrl._shared.spec import parse_job
from kestrl.episode import Episode, Group, Purpose, Scenario, StopReason
from kestrl.runstate.history import History, IdleTime, LastStep
from kestrl.runstate.state import EngineBuild, EngineFleet, RunState, StoreAccess
from kestrl.runstate.work import EngineWork
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup

ODD = "a b ü + @ ( ) , = # %"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "KESTRL_RUNS"}
MANIFEST: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/m"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "format"}],
    },
}


def kestrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder; a traceback is never an answer."""
    ended = run_program(*arguments, cwd=folder, env={**ENVIRONMENT, ERRORS: os.environ[ERRORS]})
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a manifest, and a finished run in `runs` as a learner leaves it."""
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(MANIFEST))
    run = RunDir(folder / "runs" / "job-1")
    run.path.mkdir(parents=True)
    make_folders(run, parse_job(MANIFEST), folder)
    episode = Episode(
        id="job-1/0-0-0/0",
        group_id="job-1/0-0-0",
        scenario_id="0",
        index=0,
        seed=1,
        started_at=0.0,
        seconds=1.0,
        stop_reason=StopReason.ANSWERED,
        rows=[],
        turns=[],
        tool_calls=[],
        messages=[],
        failure=None,
        policy=None,
        engine="e",
        environments={"Shop": {"basket": {"lamp\x1b": 2}}},
    )
    scenario = Scenario(id="0", ordinal=0, messages=[{"role": "user", "content": "?"}], ground_truth="1")
    group = Group(id="job-1/0-0-0", scenario=scenario, episodes=[episode])
    stored = [StoredGroup(group=group, outcome=GroupOutcome.TRAINED)] * 2000
    batch = EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=stored)
    ObjectEpisodeStore(open_store(str(run.path))).append(batch)
    (run.path / "logs" / "learner-0.log").write_text("one\ntwo\n")
    return folder


def test_reading_commands_work_where_the_run_was_started(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    listed = kestrl(folder, "episodes", "list")
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 2000)
    shown = kestrl(folder, "episodes", "show", "job-1/0-0-0/0")
    assert "episode job-1/0-0-0/0" in shown.stdout
    missing = kestrl(folder, "export", "--out", "adapter")
    assert (missing.returncode, "no published adapter" in missing.stderr) == (2, True)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_output_to_a_closed_pipe_ends_quietly(folder: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m kestrl._app.cli.main episodes list | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (len(ended.stdout.splitlines()), ended.stderr) == (1, "")


def test_a_refused_run_leaves_the_live_runs_record_alone(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    record = (run.path / "job.json").read_bytes()
    handle = run.lock()
    assert handle is not None
    try:
        refused = kestrl(folder, "run", "job.yaml", "--set", "schedule.maxSteps=3")
    finally:
        os.close(handle)
    assert (refused.returncode, "is already running" in refused.stderr) == (2, True)
    assert (run.path / "job.json").read_bytes() == record


@pytest.mark.parametrize("content", ["", '{"spec": ', "[]"])
@pytest.mark.parametrize("name", ["job.json", "run.json", "summary.json"])
def test_a_damaged_record_is_one_error_that_names_the_file(folder: Path, name: str, content: str) -> None:
    (folder / "runs" / "job-1" / name).write_text(content)
    ended = kestrl(folder, "status")
    if name == "job.json":  # status does not need the manifest
        ended = kestrl(folder, "episodes", "list")
    assert ended.returncode == 2
    assert f"runs/job-1/{name} is damaged" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_damaged_episode_is_one_error_that_names_the_file(folder: Path) -> None:
    (folder / "runs" / "job-1" / "episodes" / "train" / "step=000001.parquet").write_bytes(b"\xff\xff")
    ended = kestrl(folder, "episodes", "list")
    assert (ended.returncode, "step=000001.parquet is damaged" in ended.stderr) == (2, True)


def test_zero_lines_of_a_log_print_nothing(folder: Path) -> None:
    assert kestrl(folder, "logs", "-n", "0").stdout == ""
    assert kestrl(folder, "logs", "-n", "1").stdout == "learner-0 | two\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["logs", "-n", "-1"],
        ["run", "job.yaml", "--base-port", "70000"],
        ["validate", "job.yaml", "--set", "data.seed=2026-13-45"],
        ["validate", "job.yaml", "--set", f"data.seed={'9' * 5000}"],
        ["validate", "job.yaml", "--set", f"data.seed={'[' * 5000}"],
        ["validate", "deep.yaml"],
    ],
    ids=["lines", "port", "date", "number", "nesting", "file"],
)
def test_what_cannot_be_read_is_one_error(folder: Path, arguments: list[str]) -> None:
    (folder / "deep.yaml").write_text("[" * 5000)
    ended = kestrl(folder, *arguments)
    assert ended.returncode == 2, ended.stderr


def test_rows_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "m").mkdir()
    for line in ("[" * 100_000, '{"id": ' + "9" * 5000 + "}"):
        (folder / "train.jsonl").write_text(
            json.dumps({"id": "1", "question": "?", "ground_truth": "1"}) + f"\n{line}\n"
        )
        ended = kestrl(folder, "validate", "job.yaml")
        assert ended.returncode == 2
        assert "train.jsonl:2: not JSON" in ended.stderr


def test_an_episodes_environments_are_shown(folder: Path) -> None:
    shown = kestrl(folder, "episodes", "show", "job-1/0-0-0/0")
    assert '  environment Shop: {"basket": {"lamp\\u001b": 2}}' in shown.stdout.splitlines(), shown.stdout


def test_control_characters_of_stored_text_are_escaped(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    (run.path / "logs" / "learner-0.log").write_text("\x1b]52;c;aGk=\x07\n")
    seen = {"state": "running", "pid": 1, "last_exit": 1, "restarts": 1, "ports": {}, "last_error": "[/b] [red]\x1b[2J"}
    progress = {"phase": "training", "step": 0, "total_steps": 1, "means": {"m": 1.0}, "engines_converged": 0}
    progress |= {"engines_total": 1, "policy": "[/b]", "eta_seconds": 0, "failures": {"engine/x[/b]": 1}}
    record = {"components": {"learner-0": seen}, "progress": progress, "reason": "[engine/no_engine_proved] x\x1b[2J"}
    (run.path / "run.json").write_text(json.dumps(record))
    shown = kestrl(folder, "status")
    assert shown.returncode == 0, shown.stderr
    assert "[engine/no_engine_proved] x\\x1b[2J" in shown.stdout
    assert kestrl(folder, "logs").stdout == "learner-0 | \\x1b]52;c;aGk=\\x07\n"


def test_status_shows_which_builds_answered_and_what_named_their_policies(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    builds = (EngineBuild(engine="vllm", version="0.32.0", witness="engine"),)
    record = RunnerRecordFile(run.path / "run.json", RunnerRecord())
    record.update(state=RunState())
    record.flush()
    assert "engines:" not in kestrl(folder, "status").stdout
    record.update(state=RunState(engines=EngineFleet(builds=builds)))
    record.flush()
    assert "engines: vllm 0.32.0, policies named by its engine" in kestrl(folder, "status").stdout


def test_status_shows_who_stood_idle_in_the_last_step_and_why(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    record = RunnerRecordFile(run.path / "run.json", RunnerRecord())
    record.update(state=RunState())
    record.flush()
    assert "idle" not in kestrl(folder, "status").stdout
    idle = IdleTime(seconds=20, learner={"groups": 8.0, "policy": 0.2}, engine_seconds=40, engines={"update": 22})
    record.update(state=RunState(last_step=LastStep(idle=idle)))
    record.flush()
    line = "idle in the last step: learner 41% (groups 40%, policy 1%), engines 55% (update 55%)"
    assert line in kestrl(folder, "status").stdout


def test_status_shows_what_each_engine_did(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    record = RunnerRecordFile(run.path / "run.json", RunnerRecord())
    record.update(state=RunState())
    record.flush()
    assert "job-1 has no counts of engines yet" in kestrl(folder, "status", "--engines").stdout
    did = EngineWork(
        busy_seconds=20, sampled_tokens=24_000, prompt_tokens=60_000, cached_tokens=30_000, prefill_seconds=1,
        decode_seconds=3, turn_tokens=500, repeated_tokens=400,
    )  # fmt: skip
    work = {"engine-0": did, "engine-[1]": EngineWork(prompt_tokens=7)}
    record.update(state=RunState(history=History(work=work)))
    record.flush()
    shown = kestrl(folder, "status", "--engines").stdout
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if "engine-" in line]
    assert rows == [
        ["engine-0", "24,000", "1,200", "25%", "60,000", "50%", "80%"],
        ["engine-[1]", "0", "-", "-", "7", "0%", "-"],
    ]
    assert max(map(len, shown.splitlines())) <= 80


def test_status_shows_that_a_live_run_waits_for_its_storage(folder: Path) -> None:
    run = RunDir(folder / "runs" / "job-1")
    state = RunState(storage=StoreAccess(wait="storage does not answer: [refused]"))
    RunnerRecordFile(run.path / "run.json", RunnerRecord()).update(state=state)
    assert "waiting:" not in kestrl(folder, "status").stdout
    handle = run.lock()
    assert handle is not None
    try:
        assert "waiting: storage does not answer: [refused]" in kestrl(folder, "status").stdout
    finally:
        os.close(handle)
