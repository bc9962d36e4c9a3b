"""The command line without an engine: what it prints, and one clear message with exit code 2 for invalid input."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from array import array
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tests.program import run_program

from kestrl._app.cli.commands import COMMANDS
from kestrl.episode import (
    CallOutcome,
    Episode,
    Group,
    PolicyVersion,
    Purpose,
    Row,
    Scenario,
    StopReason,
    ToolCall,
    Turn,
)
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS, digest
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup

ROOT = Path(__file__).parents[4]


def kestrl(*arguments: str | Path, code: int = 0, **environment: str) -> str:
    """Runs the program as a person would; returns what it printed."""
    done = run_program(*arguments, env={**os.environ, "COLUMNS": "200", **environment})
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    assert done.returncode == code, printed
    return printed


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    rows = [{"id": number, "question": f"{number}?", "ground_truth": number} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
        },
    }


def write(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_valid_manifest_is_accepted(tmp_path: Path, manifest: dict[str, Any]) -> None:
    assert "valid, 8 train scenarios" in kestrl("validate", write(tmp_path, manifest))


def test_everything_wrong_is_reported_at_once(tmp_path: Path, manifest: dict[str, Any]) -> None:
    manifest["spec"]["algorithm"] = {"groupsize": 1}
    manifest["spec"]["rollout"] = {"deadlines": {"tool": "ten"}}
    printed = kestrl("validate", write(tmp_path, manifest), code=2)
    assert "spec.algorithm.groupsize: unknown field; did you mean groupSize?" in printed
    assert "spec.rollout.deadlines.tool: 'ten' is not a duration" in printed


@pytest.mark.parametrize("command", ["run", "validate", "plan"])
def test_a_bad_field_ends_every_command_alike(tmp_path: Path, manifest: dict[str, Any], command: str) -> None:
    path = write(tmp_path, manifest)
    printed = kestrl(command, path, "--set", "sampling.temperature=0", code=2)
    assert "spec.sampling.temperature: 0 samples the same episode every time" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.base=nowhere", "spec.model.base: "),
        ("model.base=demo://nobody", "no installed package offers demo://nobody"),
        ("data.train.uri=none.jsonl", "spec.data.train.uri: "),
        ("agent.template.uri=none.jinja", "spec.agent.template.uri: "),
        ("model.adapter.rank=1024", "spec.model.adapter.rank: 1024 is above the engine's limit of 512"),
        (
            "model.adapter.targets=[q_proj, embed_tokens]",
            "spec.model.adapter.targets: embed_tokens is an embedding; engines serve adapters of linear layers only",
        ),
        ("model.adapter.targets=[q_proj, lm_head]", "spec.model.adapter.targets: lm_head is not applied by vLLM"),
    ],
)
def test_missing_inputs_of_a_run_are_named(
    tmp_path: Path, manifest: dict[str, Any], override: str, message: str
) -> None:
    printed = kestrl("run", write(tmp_path, manifest), "--set", override, "--runs", tmp_path / "runs", code=2)
    assert message in printed


def test_a_bad_row_is_named_with_file_line_and_field(tmp_path: Path, manifest: dict[str, Any]) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": 1, "question": "x"}\n{"id": 2, "oops": 1}\n')
    printed = kestrl("validate", write(tmp_path, manifest), code=2)
    assert "train.jsonl:2: prompt: give either `prompt` or `question`" in printed


def test_a_taken_port_is_named(tmp_path: Path, manifest: dict[str, Any]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["run", write(tmp_path, manifest), "--runs", tmp_path / "runs", "--base-port", port]
        assert f"--base-port {port}: port {port} for engine-0 is taken" in kestrl(*arguments, code=2)


def test_a_runs_folder_that_cannot_be_made_is_named(tmp_path: Path, manifest: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("")
    printed = kestrl("run", write(tmp_path, manifest), "--runs", tmp_path / "file", code=2)
    assert "cannot be made" in printed
    assert "--runs" in printed


def test_a_file_that_is_not_a_manifest(tmp_path: Path) -> None:
    assert "cannot be read" in kestrl("validate", tmp_path / "none.yaml", code=2)


def test_the_plan_is_printed(tmp_path: Path, manifest: dict[str, Any]) -> None:
    printed = kestrl("plan", write(tmp_path, manifest), "--json", "--set", "inference.replicas=2")
    components = json.loads(printed)
    assert [item["name"] for item in components][:2] == ["engine-0", "engine-1"]
    assert components[-1]["settings"]["algorithm"]["group_size"] == 8
    table = kestrl("plan", write(tmp_path, manifest), "--set", "inference.replicas=2", COLUMNS="80")
    assert "learner-0" in table
    assert "kestrl_inference.inside.launcher" in table
    assert "\u2026" not in table, "no word is cut"
    assert "\ncredentials of engine-0, engine-1: KESTRL_ENGINE_KEY, KESTRL_ENGINE_CONTROL_KEY\n" in table


def test_the_plan_makes_no_folder_and_names_data_where_a_run_has_it(tmp_path: Path) -> None:
    quickstart = ROOT / "examples" / "email-search" / "quickstart.yaml"
    learner = json.loads(kestrl("plan", quickstart, "--json", "--runs", tmp_path / "runs"))[-1]["settings"]
    for data in (learner["data"], learner["validation"]):
        assert data["path"].startswith(f"{tmp_path}/runs/.data/")
    assert list(tmp_path.iterdir()) == []


def test_schema_and_version() -> None:
    assert json.loads(kestrl("schema"))["title"] == "AgentRLJob"
    assert kestrl("version").startswith("kestrl 0.")


def test_commands_of_applications_exist() -> None:
    printed = kestrl("--help")
    assert "demo-model" in printed
    assert "email" in printed


POLICY = PolicyVersion(job="job", step=1, sha256="ab" * 32)


def stored_group() -> Group:
    row = Row(
        token_ids=array("i", [5, 6, 7]), mask=b"\0\1\1", logprobs=array("f", [0.0, -0.5, -0.25]), policies=[POLICY.name]
    )
    turn = Turn(
        index=0,
        row=0,
        start=1,
        end=3,
        text="12",
        finish_reason="stop",
        engine="engine-0",
        policy=POLICY.name,
        seconds=0.1,
    )
    call = ToolCall(turn=0, name="calc", raw="{", arguments=None, outcome=CallOutcome.INVALID_JSON, text="not JSON")
    episode = Episode(
        id="job-1/0-3-0/0",
        group_id="job-1/0-3-0",
        scenario_id="3",
        index=0,
        seed=1,
        rows=[row],
        turns=[turn],
        tool_calls=[call],
        messages=[{"role": "user", "content": "3?"}, {"role": "assistant", "content": "12"}],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=POLICY,
        engine="engine-0",
        started_at=1.0,
        seconds=0.5,
        reward=0.75,
        rewards={"exact_answer": 0.75},
        metrics={"answer_correct": 1.0},
    )
    scenario = Scenario(id="3", ordinal=3, messages=[{"role": "user", "content": "3?"}], ground_truth="12")
    return Group(id="job-1/0-3-0", scenario=scenario, episodes=[episode])


@pytest.fixture
def finished(tmp_path: Path, manifest: dict[str, Any]) -> Path:
    """The folder of runs, with a run in it as a learner leaves it."""
    from kestrl._app.local.rundir import make_folders, open_run
    from kestrl._shared.spec import parse_job

    runs = tmp_path / "runs"
    run, _ = open_run(runs, parse_job(manifest), new=False)
    make_folders(run, parse_job(manifest), tmp_path)
    store = open_store(run.path.as_uri())
    stored = [StoredGroup(group=stored_group(), outcome=GroupOutcome.TRAINED)]
    ObjectEpisodeStore(store).append(EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=stored))
    files = {WEIGHTS: b"weights", "adapter_config.json": b"{}"}
    adapter = AdapterManifest(
        job="job",
        step=1,
        sha256=digest(b"weights"),
        files={name: digest(content) for name, content in files.items()},
        base_model="/m",
        rank=8,
        alpha=16,
        targets=("q_proj",),
        parent=None,
        probe=Probe(token_ids=(1,), logprobs=(), base_logprobs=()),
    )
    publish_adapter(store, files, adapter)
    (run.path / "logs" / "learner-0.log").write_text("step 1\nstep 2\n")
    (run.path / "summary.json").write_text(
        json.dumps({"status": "failed", "reason": "the disk", "failures": {"tool/x": 2}})
    )
    return runs


def test_commands_that_status_suggests_can_be_typed(finished: Path) -> None:
    moved = finished.rename(finished.with_name("my runs ü"))
    assert f"--runs '{moved}'" in kestrl("status", "--runs", moved)


def test_status_of_a_dead_run_shows_the_reason_and_the_fix(finished: Path) -> None:
    printed = kestrl("status", "--runs", finished)
    for expected in ("job-1 failed", "reason: the disk", "failures tool/x: 2", "run the same command again to resume"):
        assert expected in printed
    assert json.loads(kestrl("status", "--runs", finished, "--json"))["state"] == "failed"


def test_a_runtime_class_is_refused_on_one_machine(tmp_path: Path, manifest: dict[str, Any]) -> None:
    manifest["spec"]["tools"] = [{"use": "a:b", "sandbox": {"runtimeClassName": "gvisor"}}]
    printed = kestrl("run", write(tmp_path, manifest), "--runs", tmp_path / "runs", code=2)
    assert "spec.tools[0].sandbox.runtimeClassName: is gvisor, and only a cluster has RuntimeClasses" in printed


def test_a_claim_of_sandboxes_is_refused_on_one_machine(tmp_path: Path, manifest: dict[str, Any]) -> None:
    claim = {"warmPool": "code", "secretRef": {"name": "s"}}
    manifest["spec"]["tools"] = [{"use": "kestrl_sandbox.tool:CodeInterpreter", "sandbox": {"claim": claim}}]
    printed = kestrl("run", write(tmp_path, manifest), "--runs", tmp_path / "runs", code=2)
    assert "spec.tools[0].sandbox.claim: names the warm pool code, and only a cluster has warm pools" in printed


def test_status_shows_the_sandbox_in_which_code_runs(finished: Path) -> None:
    progress = {"phase": "training", "sandboxes": {"code": {"backend": "bwrap", "isolation": "namespaces"}}}
    (finished / "job-1" / "run.json").write_text(json.dumps({"version": 1, "run": "job-1", "progress": progress}))
    assert "sandbox of code: bwrap, isolates by namespaces\n" in kestrl("status", "--runs", finished)
    record = json.loads(kestrl("status", "--runs", finished, "--json"))["record"]
    assert record["state"]["tools"]["sandboxes"] == progress["sandboxes"]


def test_logs(finished: Path) -> None:
    assert kestrl("logs", "--runs", finished, "-n", "1") == "learner-0 | step 2\n"
    assert "no log of 'tools-0' (there are: learner-0)" in kestrl("logs", "--runs", finished, "-c", "tools-0", code=2)


def test_an_episode_is_shown_as_the_engine_saw_it(finished: Path) -> None:
    from kestrl.data.locate import locate_model

    arguments = ["episodes", "show", "job-1/0-3-0/0", "--runs", finished, "--prompt"]
    assert "settings/rollout-0.json, which names the tokenizer" in kestrl(*arguments, code=2)
    (finished / "job-1" / "settings").mkdir(exist_ok=True)
    named = {"tokenizer": locate_model("demo://tiny", base=finished)}
    (finished / "job-1" / "settings" / "rollout-0.json").write_text(json.dumps(named))
    shown = kestrl(*arguments)
    assert "row 0, 1 tokens given:\n" in shown
    assert "row 0, 2 tokens sampled:\n" in shown


def test_episodes(finished: Path) -> None:
    listed = kestrl("episodes", "list", "--runs", finished)
    assert listed.startswith("job-1/0-3-0/0  step 1  reward 0.750  turns 1  answered")
    shown = kestrl("episodes", "show", "job-1/0-3-0/0", "--runs", finished, "--tokens")
    for expected in (
        'ground truth: "12"',
        "turn 0 call calc invalid_json",
        "reward exact_answer: 0.7500",
        "row 0: 3 tokens, 2 sampled",
    ):
        assert expected in shown
    lines = [line.split() for line in shown.splitlines() if " id " in line]
    assert [(line[2], line[4], line[6]) for line in lines if len(line) > 6] == [
        ("5", "0", "-"),
        ("6", "1", "-0.500000"),
        ("7", "1", "-0.250000"),
    ]
    assert lines[1][-1] == POLICY.name
    assert "no stored episode has the id 'x'" in kestrl("episodes", "show", "x", "--runs", finished, code=2)


def test_episodes_are_selected(finished: Path) -> None:
    def listed(*options: str) -> list[str]:
        return kestrl("episodes", "list", "--runs", finished, *options).splitlines()

    assert len(listed("--scenario", "3", "--step", "1", "--not-failed")) == 1
    for other in (("--failed",), ("--scenario", "4"), ("--step", "0"), ("--purpose", "eval")):
        assert listed(*other) == ["nothing is selected; stored are train 1"], "on standard error"
    refused = kestrl("episodes", "list", "--runs", finished, "--purpose", "evaluation", code=2)
    assert "--purpose: 'evaluation' is neither train nor eval" in refused


def test_export_writes_the_adapter_and_never_over_something(finished: Path, tmp_path: Path) -> None:
    kestrl("export", "--runs", finished, "--out", tmp_path / "adapter")
    assert (tmp_path / "adapter" / WEIGHTS).read_bytes() == b"weights"
    assert "exists already" in kestrl("export", "--runs", finished, "--out", tmp_path / "adapter", code=2)
    printed = kestrl("export", "--runs", finished, "--out", tmp_path / "x", "--step", "9", code=2)
    assert "no published adapter of step 9 (there are: 1)" in printed


def test_stop_of_a_run_that_is_not_running(finished: Path) -> None:
    assert "job-1 is not running" in kestrl("stop", "--runs", finished)


def test_no_run_at_all(tmp_path: Path) -> None:
    assert "there is no run in" in kestrl("status", "--runs", tmp_path / "empty", code=2)


def test_the_listed_commands_are_those_that_their_modules_add() -> None:
    added: dict[str, tuple[str, str]] = {}
    for module in sorted({listed.module for listed in COMMANDS.values()}):
        app = typer.Typer()
        import_module(f"kestrl._app.cli.{module}").register(app)
        for name, command in typer.main.get_group(app).commands.items():
            added[name] = (module, " ".join((command.help or "").split("\n\n")[0].split()))
    assert added == COMMANDS


def test_help_and_version_import_no_command() -> None:
    script = "import sys; from kestrl._app.cli.main import main\ntry: main()\nfinally: print(sorted(sys.modules))"
    for option in ("-h", "--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, check=True)
        loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
        assert loaded.isdisjoint({"pydantic", "grpc", "obstore", "yaml", "kestrl._shared.spec"}), option
    assert done.stdout.startswith(f"kestrl {version('kestrl')}\n")


def test_a_misspelled_command_names_the_one_that_is_meant() -> None:
    done = subprocess.run([sys.executable, "-m", "kestrl._app.cli.main", "exprot"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Did you mean 'export'?" in done.stderr
