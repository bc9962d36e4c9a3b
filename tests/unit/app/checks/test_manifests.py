"""`kestrl validate` and `kestrl doctor` of SFTJobs and Thresholds, and of the jobs that a Threshold names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl.errors import UserInputError

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def write(path: Path, kind: str, spec: dict[str, Any]) -> Path:
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": kind, "metadata": {"name": "sums"}, "spec": spec}
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def write_sft(folder: Path, conversations: list[Any], **training: Any) -> Path:
    (folder / "conversations.jsonl").write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in conversations)
    )
    data = {"train": {"uri": "conversations.jsonl"}}
    return write(folder / "sft.yaml", "SFTJob", {"model": {"base": "demo://tiny"}, "data": data, "training": training})


def write_threshold(folder: Path, **job: Any) -> Path:
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"id": n, "question": f"{n}?", "ground_truth": str(n)}) + "\n" for n in range(8))
    )
    rows = {"uri": "rows.jsonl"}
    spec = {
        "model": {"base": "demo://tiny"},
        "data": {"train": rows, "validation": rows},
        "schedule": {"evalEvery": 1},
        "rewards": [{"rule": "exact_answer"}],
    }
    write(folder / "job.yaml", "AgentRLJob", {**spec, **job})
    published = {"value": 0.5, "setting": "a desk", "source": "a page"}
    threshold = {"job": "job.yaml", "metric": "reward", "threshold": 0.5, "template": "its own", "published": published}
    return write(folder / "threshold.yaml", "Threshold", {**threshold, "sft": "sft.yaml"})


def run(command: str, manifest: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, [command, str(manifest), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def refusal(command: str, manifest: Path, *arguments: str) -> str:
    with pytest.raises(UserInputError) as error:
        run(command, manifest, *arguments)
    return str(error.value)


def test_the_conversations_of_an_sft_job_are_rendered(tmp_path: Path) -> None:
    path = write_sft(tmp_path, [MESSAGES] * 3)
    assert run("validate", path).endswith("valid, 3 train conversations\n")
    broken = write_sft(tmp_path, [MESSAGES, [{"role": "user", "content": "no answer"}]])
    assert "conversations.jsonl" in refusal("validate", broken)
    assert "learner.device" not in run("doctor", write_sft(tmp_path, [MESSAGES]), "--runs", str(tmp_path))


def test_conversations_that_are_trained_on_and_held_out_are_counted(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"messages": each}) + "\n" for each in [MESSAGES, other]))

    def warned(validation: str) -> bool:
        path = write_sft(tmp_path, [MESSAGES] * 3)
        manifest = json.loads(path.read_text())
        manifest["spec"]["data"]["validation"] = {"uri": validation}
        path.write_text(json.dumps(manifest))
        output = run("validate", path)
        return "warning: spec.data.validation: 1 of 2 conversations are also in spec.data.train" in output

    assert warned("held_out.jsonl")
    assert not warned("conversations.jsonl"), "one data set that is named twice is meant"
    held_out.write_text(json.dumps({"messages": other}) + "\n")
    assert not warned("held_out.jsonl")


def test_conversations_beyond_the_models_positions_are_a_problem(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "2 + 2? " * 1200}, {"role": "assistant", "content": "4"}]
    path = write_sft(tmp_path, [MESSAGES, long], maxTokens=10_000)
    message = refusal("validate", path)
    assert message.startswith("spec.training.maxTokens: a conversation has ")
    assert "the model 2048 positions; set it to 2048" in message
    output = run("validate", write_sft(tmp_path, [MESSAGES, long], maxTokens=2048))
    assert "warning: spec.data.train: 1 of 2 conversations are left out as longer than maxTokens" in output
    assert "valid, 1 train conversations" in output


def test_a_threshold_is_checked_with_its_jobs(tmp_path: Path) -> None:
    write_sft(tmp_path, [MESSAGES])
    path = write_threshold(tmp_path)
    assert run("validate", path).endswith("valid, 1 train conversations, 8 train scenarios, 8 validation scenarios\n")
    write_threshold(tmp_path, data={"train": {"uri": "gone.jsonl"}}, schedule={})
    (tmp_path / "conversations.jsonl").unlink()
    lines = refusal("validate", path).splitlines()
    assert lines[0].startswith("spec.sft: sft.yaml: spec.data.train.uri: ")
    assert lines[1].startswith("spec.job: job.yaml: spec.data.train.uri: ")
    assert "spec.job: job.yaml: spec.data.validation: is missing" in lines[2]
    assert "spec.job: job.yaml: spec.schedule.evalEvery: must be set" in lines[3]


def test_fields_of_another_kind_are_refused_as_fields_of_that_kind(tmp_path: Path) -> None:
    path = write_sft(tmp_path, [MESSAGES], maxTokens=0)
    assert "spec.training.maxTokens" in refusal("validate", path)
    assert "spec.training.maxTokens" in refusal("doctor", path)


def test_findings_are_printed_as_json_with_the_same_exit_code(tmp_path: Path) -> None:
    path = write_sft(tmp_path, [MESSAGES])
    assert json.loads(run("validate", path, "--json"))["rows"] == {"train": 1}
    (tmp_path / "conversations.jsonl").unlink()
    done = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert (done.exit_code, json.loads(done.output)["valid"]) == (2, False)
    findings = {each["name"]: each for each in json.loads(run("doctor", path, "--json", "--runs", str(tmp_path)))}
    assert findings["job"]["fix"].startswith("spec.data.train.uri: ")


@pytest.mark.parametrize("command", ["validate", "doctor"])
def test_a_file_that_is_no_manifest_is_a_problem_in_json(tmp_path: Path, command: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: [b\n")
    done = CliRunner().invoke(app, [command, str(path), "--json"])
    printed = json.loads(done.output)
    problem = printed["problems"][0] if command == "validate" else printed[0]["fix"]
    assert (done.exit_code, problem.partition(": while")[0]) == (2, f"{path}: not YAML")
