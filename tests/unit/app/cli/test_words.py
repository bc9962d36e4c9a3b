"""Words of other frameworks and other spellings, as a person types them in a manifest and in `--set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from tests.program import run_program, whole_text

from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.sft import SFTJob
from kestrl._shared.spec.validation import all_fields
from kestrl._shared.spec.words import WORDS, Word, table

PAGE = Path(__file__).parents[4] / "docs" / "coming-from.md"
JOB: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "format"}],
    },
}
SFT: dict[str, Any] = {
    **JOB,
    "kind": "SFTJob",
    "spec": {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "train.jsonl"}}},
}
THRESHOLD: dict[str, Any] = {
    **JOB,
    "kind": "Threshold",
    "spec": {
        "job": "job.yaml",
        "metric": "reward",
        "threshold": 0.5,
        "template": "none",
        "published": {"value": 0.5, "setting": "none", "source": "none"},
    },
}


def refused(folder: Path, command: str, manifest: dict[str, Any], *overrides: str) -> str:
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
    arguments = [argument for override in overrides for argument in ("--set", override)]
    ended = run_program(command, "job.yaml", *arguments, cwd=folder)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert not (folder / "runs").exists()
    return whole_text(ended.stderr)


@pytest.mark.parametrize("command", ["validate", "run", "plan", "doctor"])
def test_a_spelling_that_a_cluster_does_not_know_is_refused(tmp_path: Path, command: str) -> None:
    job = {**JOB, "spec": {**JOB["spec"], "algorithm": {"group_size": 4}, "learner": {"gradient_checkpointing": True}}}
    printed = refused(tmp_path, command, job, "algorithm.learning_rate=1e-5")
    assert "spec.algorithm.group_size: unknown field; did you mean groupSize?" in printed
    assert "spec.algorithm.learning_rate: unknown field; did you mean learningRate?" in printed
    assert "spec.learner.gradient_checkpointing: unknown field; did you mean gradientCheckpointing?" in printed


def test_a_required_field_in_another_spelling_is_one_problem(tmp_path: Path) -> None:
    job = {("api_version" if name == "apiVersion" else name): value for name, value in JOB.items()}
    assert refused(tmp_path, "validate", job) == "error: api_version: unknown field; did you mean apiVersion?\n"


def test_other_kinds_of_files_have_one_spelling_too(tmp_path: Path) -> None:
    sft: dict[str, Any] = {**SFT, "spec": {**SFT["spec"], "template_arguments": {}}}
    printed = refused(tmp_path, "sft", sft, "training.batch_size=4", "num_train_epochs=2")
    assert "spec.template_arguments: unknown field; did you mean templateArguments?" in printed
    assert "spec.training.batch_size: unknown field; did you mean batchSize?" in printed
    assert (
        "spec.num_train_epochs: unknown field; did you mean spec.training.epochs (num_train_epochs of TRL)?" in printed
    )
    threshold = {**THRESHOLD, "spec": {**THRESHOLD["spec"], "min_rise": 0.1}}
    assert "spec.min_rise: unknown field; did you mean minRise?" in refused(tmp_path, "verify", threshold)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("num_generations=4", "spec.num_generations: unknown field; did you mean spec.algorithm.groupSize"),
        (
            "algorithm.numGenerations=4",
            "spec.algorithm.numGenerations: unknown field; did you mean spec.algorithm.group",
        ),
        ("lr=1e-6", "spec.lr: unknown field; did you mean spec.algorithm.learningRate (lr of verl;"),
        ("learning_rate=1e-6", "spec.learning_rate: unknown field; did you mean spec.algorithm.learningRate"),
        ("algorithm.beta=0.1", "did you mean spec.algorithm.kl.coefficient (beta of TRL, ART;"),
        ("algorithm.epsilon_high=0.3", "did you mean spec.algorithm.clip.high (epsilon_high of TRL, ART)?"),
        ("rollout.n=8", "spec.rollout.n: unknown field; did you mean spec.algorithm.groupSize (rollout.n of verl;"),
        ("model.lora={r: 4}", "spec.model.lora: unknown field; did you mean spec.model.adapter (lora of"),
        ("model.lora={r: 4}", "spec.model.lora.r: unknown field; did you mean spec.model.adapter.rank (r of"),
        (
            "bf16=true",
            "spec.bf16: unknown field; did you mean spec.model.dtype (bf16 of TRL; bfloat16 in place of true)?",
        ),
        ("model.adapter.lora_dropout=0.1", "adapters have no dropout: remove it"),
        ("actor_rollout_ref.actor.optim.lr=1", "spec.actor_rollout_ref.actor.optim.lr: unknown field; did you mean"),
        ("max_steps=3", "spec.max_steps: unknown field; did you mean spec.schedule.maxSteps?"),
        ("sampling.top_p=0.9", "for evaluations set spec.evaluation.topP"),
        ("model.base=Qwen/Qwen2.5-0.5B-Instruct", "write hf://Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_words_of_other_frameworks_name_the_field_that_is_meant(tmp_path: Path, override: str, problem: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1?", "ground_truth": "1"}\n')
    assert problem in refused(tmp_path, "validate", JOB, override)


def test_a_folder_that_looks_like_an_id_of_a_model_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "mine").mkdir(parents=True)
    assert "holds no model: config.json is missing" in refused(tmp_path, "validate", JOB, "model.base=Qwen/mine")


@pytest.mark.parametrize("word", WORDS, ids=lambda word: f"{word.source}-{word.theirs}")
def test_a_word_names_a_field_that_there_is(word: Word) -> None:
    kinds: list[tuple[type[BaseModel], str]] = [(AgentRLJob, word.ours), (SFTJob, word.sft)]
    for kind, field in kinds:
        assert not field or f"spec.{field.replace('[]', '')}" in all_fields(kind)
    assert word.ours or word.difference


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text()


def test_no_word_is_there_twice() -> None:
    assert len({word.theirs for word in WORDS}) == len(WORDS)
