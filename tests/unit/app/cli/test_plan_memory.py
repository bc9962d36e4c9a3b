"""`kestrl plan --memory`: what it prints, its exit codes, and one error for what it cannot estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli import memory
from kestrl._app.cli.main import app
from kestrl._shared import checking
from kestrl._shared.plan.memory import GIB, MemoryEstimate, MemoryPart, changes, memory_settings
from kestrl._shared.spec.load import parse_job
from kestrl._shared.spec.sft import parse_sft_job
from kestrl.errors import UserInputError

pytestmark = pytest.mark.share

pytestmark = pytest.mark.timeout(180)  # the learner's program imports torch
TRAINED = {MemoryPart.ADAPTER: GIB // 4, MemoryPart.GRADIENTS: GIB // 4, MemoryPart.OPTIMIZER: GIB // 2}


def job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
            "agent": {"maxTokens": 48},
            "inference": {"contextLength": 64},
            "algorithm": {"groupSize": 4},
            **spec,
        },
    }


def sft_job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "job"},
        "spec": {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "train.jsonl"}}, **spec},
    }


def written(folder: Path, document: dict[str, Any]) -> str:
    path = folder / "job.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def no_module(_: str) -> None:
    """In place of importlib's find_spec."""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_job_that_does_not_fit_names_the_fields_to_change(tmp_path: Path) -> None:
    """Without the data set of the job, which the estimate does not need."""
    done = run(written(tmp_path, job()), "--memory", "--device-memory", "0.5")
    assert done.exit_code == 2, done.output
    assert (
        "The largest pass holds 8 of a step's 32 rows of 16 + 48 tokens; float32, rank 8, without gradient"
        in done.output
    )
    assert "does not fit: 0." in done.output
    assert all(part in done.output for part in ("base weights", "activations", "peak"))


def test_the_least_number_of_checkpointed_layers_that_fits_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, job(learner={"gradientCheckpointing": True}))
    done = run(path, "--memory", "--device-memory", "4")
    assert done.exit_code == 0, done.output
    assert "spec.learner.checkpointedLayers: 1 fits, too, and computes 3 of 4 layers once" in done.output
    done = run(path, "--memory", "--device-memory", "4", "--json", "--set", "learner.checkpointedLayers=1")
    assert "checkpointed_layers" not in json.loads(done.output), "the job names the number"


def test_a_fine_tuning_job_that_fits_as_json(tmp_path: Path) -> None:
    path = written(tmp_path, sft_job(training={"batchSize": 2}))
    done = run(path, "--memory", "--row", "20+30", "--device-memory", "4", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.output)
    assert printed["fits"]
    assert printed["rows"] == 2
    assert printed["total"] == sum(printed["parts"].values())


def test_the_memory_of_a_rank_is_printed_with_what_is_shared(tmp_path: Path) -> None:
    path = written(tmp_path, job(learner={"accelerator": {"count": 2}, "replicas": 2}))
    done = run(path, "--memory")
    assert done.exit_code == 0, done.output
    assert all(text in done.output for text in ("each of 4 ranks", "gathered layers", "are divided among 4 ranks"))
    assert "On one machine they take" in done.output


def test_offloaded_activations_are_printed_beside_the_device(tmp_path: Path) -> None:
    learner = {"device": "cuda", "gradientCheckpointing": True, "activationOffload": True}
    path = written(tmp_path, sft_job(training={"batchSize": 2}, learner=learner))
    done = run(path, "--memory", "--row", "200+3000")
    assert done.exit_code == 0, done.output
    assert "Offloaded activations take 0." in done.output


def test_a_model_whose_config_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    done = run(written(tmp_path, job(model={"base": "model"})), "--memory")
    assert isinstance(done.exception, UserInputError)
    assert str(done.exception).startswith("spec.model.base: ")
    assert "not a valid JSON file" in str(done.exception)
    assert len(str(done.exception).splitlines()) == 1


def test_a_machine_without_the_learner_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "find_spec", no_module)
    done = run(written(tmp_path, job()), "--memory")
    assert str(done.exception) == (
        "spec.learner: kestrl-learner is not installed, whose program estimates its memory; install it"
    )


@pytest.mark.parametrize("row", ["160", "0+4", "a+b", "1+2+3"])
def test_a_row_of_another_form_is_refused(row: str, tmp_path: Path) -> None:
    done = run(written(tmp_path, job()), "--memory", "--row", row)
    assert str(done.exception).startswith(f"--row: {row!r} is not PROMPT+COMPLETION")


@pytest.mark.parametrize("option", [("--row", "1+1"), ("--device-memory", "4")])
def test_options_of_the_estimate_need_it(option: tuple[str, str], tmp_path: Path) -> None:
    done = run(written(tmp_path, job()), *option)
    assert "give it too" in str(done.exception)


def test_the_step_is_the_longest_that_the_manifest_allows() -> None:
    rl = memory_settings(
        parse_job(job(learner={"accelerator": {"profile": "nvidia"}}, algorithm={"groupSize": 4, "maxStaleness": 2})),
        model="m",
        row=None,
    )
    assert (rl.prompt, rl.completion, rl.group_rows, rl.published) == (16, 48, 4, 3)
    assert rl.policy.device == "cuda"
    assert not rl.policy.activation_offload
    sft = memory_settings(parse_sft_job(sft_job(training={"maxTokens": 512, "batchSize": 3})), model="m", row=None)
    assert (sft.prompt, sft.completion, sft.group_rows, sft.groups) == (1, 511, 3, 1)
    assert memory_settings(parse_sft_job(sft_job()), model="m", row=(7, 9)).completion == 9


def changed(activations: float, rows: int, document: dict[str, Any]) -> list[str]:
    parse: Any = parse_sft_job if document["kind"] == "SFTJob" else parse_job
    parts = {MemoryPart.BASE: 2 * GIB, **TRAINED, MemoryPart.ACTIVATIONS: int(activations * GIB)}
    return list(
        changes(memory_settings(parse(document), model="m", row=(16, 48)), MemoryEstimate(parts=parts, rows=rows))
    )


def test_the_largest_part_names_its_field_first() -> None:
    plain = changed(9, 4, job())
    assert [line.split(" is ")[0] for line in plain] == [
        "spec.learner.gradientCheckpointing",
        "spec.model.dtype",
        "spec.model.adapter.rank",
    ]
    checkpointed = job(learner={"gradientCheckpointing": True}, model={"base": "demo://tiny", "dtype": "bfloat16"})
    assert (
        changed(9, 4, checkpointed)[0] == "spec.learner.tokensPerPass is 16384 (4 rows in a pass): lower it (9.00 GiB)"
    )
    assert changed(9, 1, checkpointed)[0].startswith("spec.inference.contextLength and spec.agent.maxTokens: ")
    assert changed(9, 1, sft_job(learner={"gradientCheckpointing": True}))[0].startswith("spec.training.maxTokens: ")
    assert changed(0.01, 1, checkpointed)[0] == (
        "spec.model.base: use a smaller model, or more ranks with spec.learner.accelerator.count (2.00 GiB)"
    )


def test_a_device_must_hold_the_estimate_and_its_margin() -> None:
    found = MemoryEstimate(parts={MemoryPart.BASE: 10 * GIB}, rows=1)
    assert found.fits(11.01 * GIB)
    assert not found.fits(10.9 * GIB)
    asked = memory_settings(parse_job(job()), model="m", row=None)
    assert memory.verdict(asked, found, 12) == ["fits: 11.00 GiB with a margin of 10%, of 12 GiB"]
