"""`kestrl sft` of all parameters: the update of plain torch, a run that resumes, a model that RL starts from."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.cli.sft import fine_tuned
from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.spec.load import ProblemsError, read_job
from kestrl._shared.spec.sft import read_sft_job
from kestrl.data.locate import locate_model
from kestrl.errors import UserInputError
from kestrl_demo_models.tiny import tiny
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.model import full_model
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.sft.data import Item, load_items
from kestrl_learner.sft.training import SFTRun, as_group
from kestrl_learner.train.trainer import Trainer

from .test_sft import manifest, settings_of

RATE = 1e-3


def settings(folder: Path, **training: Any) -> SFTSettings:
    return settings_of(folder, **{"parameters": "all", "learningRate": RATE} | training)


def groups(made: SFTSettings) -> list[TrainGroup]:
    items = load_items(made, made.train, "spec.data.train")
    return [as_group(items[:4]), as_group(items[4:8])]


def plain_torch(made: SFTSettings) -> dict[str, Tensor]:
    """Weights after two updates by torch's cross-entropy and AdamW, one conversation at a time, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny()), dtype=torch.float64)
    given = made.algorithm
    betas = (given.adam_beta1, given.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=betas, weight_decay=given.weight_decay)
    for group in groups(made):
        learned = sum(sum(row.mask) for row in group.rows)
        for row in group.rows:
            ids = torch.tensor(list(row.token_ids))
            labels = torch.where(torch.tensor(list(row.mask)) > 0, ids, -100)
            loss = cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="sum")
            (loss / learned).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
        assert norm > given.max_grad_norm, "clipping is tested, too"
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().float() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_are_those_of_plain_torch(tmp_path: Path, checkpointing: bool) -> None:
    """With weight decay and clipping; in float64, since Adam divides a gradient by its size and so enlarges rounding.

    The same model's loss in float32 is within 1e-6 of transformers' own.
    """
    made = settings(tmp_path, weightDecay=0.1, maxGradNorm=0.05, learningRateSchedule="constant")
    made = made.model_copy(update={"gradient_checkpointing": checkpointing})
    model = full_model.load(made)
    group = groups(made)[0]
    assert _loss(model, group) == pytest.approx(_loss_of_transformers(group), abs=1e-6)
    model.network.double()
    trainer = Trainer(model, made.algorithm, 1.0)
    for step, group in enumerate(groups(made)):
        trainer.step([group], step)
    expected, found = plain_torch(made), model.trained_state()
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - weight).abs().max()) for name, weight in expected.items()}
    assert max(apart.values()) <= 1e-6, apart


def _loss(model: full_model.FullModel, group: TrainGroup) -> float:
    with torch.no_grad():
        return -float(torch.cat([logprobs for _, logprobs in model.logprobs(group, 1.0)]).mean())


def _loss_of_transformers(group: TrainGroup) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny()), dtype=torch.float32)
    total, learned = 0.0, sum(sum(row.mask) for row in group.rows)
    for row in group.rows:
        ids = torch.tensor([list(row.token_ids)])
        labels = torch.where(torch.tensor([list(row.mask)]) > 0, ids, -100)
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * sum(row.mask) / learned
    return total


@pytest.mark.share(2)
@pytest.mark.timeout(240)  # some 15 s on an idle machine: two programs that import torch
def test_the_command_resumes_and_its_model_is_a_base(tmp_path: Path) -> None:
    """Through the manifest: stopped after 2 of 4 steps, gone on with, and the same model as without the stop."""
    training: dict[str, Any] = {"parameters": "all", "learningRate": 1e-4, "learningRateSchedule": "constant"}
    path, runs = manifest(tmp_path, **training), tmp_path / "runs"
    first = CliRunner().invoke(
        app, ["sft", str(path), "--set", "training.maxSteps=2", "--runs", str(runs)], catch_exceptions=False
    )
    assert first.exit_code == 0, first.output
    override = fine_tuned(path, ("training.maxSteps=4",), runs)
    field, _, address = override.partition("=")
    folder = Path(json.loads(address).removeprefix("file://"))
    assert field == "model.base"

    summary = json.loads((runs / "warm-up-sft" / "store" / "summary.json").read_text())
    losses = [each["loss"] for each in summary["evaluations"]]
    assert [each["step"] for each in summary["evaluations"]] == [0, 2, 4]
    assert losses[2] < losses[0], losses
    assert summary["policy"]["uri"] == json.loads(address)

    published = runs / "warm-up-sft" / "store" / "summary.json"
    before = published.stat().st_mtime_ns
    assert fine_tuned(path, ("training.maxSteps=4",), runs) == override, "it has finished: what is there is named"
    assert published.stat().st_mtime_ns == before

    # By the command, too: with other threads than its program has, a processor may round otherwise.
    fine_tuned(path, ("training.maxSteps=4",), tmp_path / "straight")
    straight = json.loads((tmp_path / "straight" / "warm-up-sft" / "store" / "summary.json").read_text())
    assert straight["policy"]["sha256"] == summary["policy"]["sha256"]

    starters = Path(__file__).parents[3] / "src" / "kestrl" / "_app" / "starters" / "files"
    job = read_job(starters / "tool" / "job.yaml", (override,))
    assert locate_model(job.spec.model.base, base=tmp_path) == str(folder)
    rl = PolicyModel(str(folder), dtype="float32", rank=4, alpha=8.0, targets="all-linear", seed=1)
    reference: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = list(range(40, 60))
    logits = reference(input_ids=torch.tensor([ids])).logits.detach()[0, :-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logits, ids[1:], strict=True)]
    assert rl.score(ids, adapter=True) == pytest.approx(expected, abs=1e-5)
    assert "kestrl" not in (folder / "config.json").read_text(), "our name of attention stays here"
    _same_tokenizer(folder)

    exported = ["export", "warm-up-sft", "--runs", str(runs), "--out", str(tmp_path / "exported")]
    assert CliRunner().invoke(app, exported, catch_exceptions=False).exit_code == 0
    names = {file.name for file in folder.iterdir()} - {"manifest.json"}
    assert {file.name for file in (tmp_path / "exported").iterdir()} == names
    merged = CliRunner().invoke(app, [*exported[:-1], str(tmp_path / "other"), "--merge"])
    assert "--merge, --step: the run trained all parameters" in str(merged.exception)


def _same_tokenizer(folder: Path) -> None:
    ours, base = (AutoTokenizer.from_pretrained(str(path)) for path in (folder, tiny()))
    messages = [{"role": "user", "content": "When does Ada meet Grace? 日本"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=True) == base.apply_chat_template(
        messages, add_generation_prompt=True
    )
    assert (ours.eos_token_id, ours.pad_token_id) == (base.eos_token_id, base.pad_token_id)


def test_bfloat16_computes_in_it_and_keeps_float32(tmp_path: Path) -> None:
    """An update far below the resolution of bfloat16 is not lost; the files are bfloat16."""
    made = settings(tmp_path, learningRate=1e-6, maxSteps=2).model_copy(update={"dtype": "bfloat16"})
    before = full_model.load(made).trained_state()
    run = SFTRun(made)
    policy = run.run()
    assert policy is not None
    after = run._model.trained_state()  # pyright: ignore[reportPrivateUsage]
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    rounded = sum(int((after[name].bfloat16() != before[name].bfloat16()).sum()) for name in before)
    assert changed > 0.5 * sum(weight.numel() for weight in before.values())
    assert rounded < 0.2 * changed
    folder = Path(policy.uri.removeprefix("file://"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    assert set(dtypes.values()) == {"BF16"}
    assert "lm_head.weight" not in dtypes, "it is the embedding's, which is written once"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_passes_of_bfloat16_are_rounded_like_autocast(tmp_path: Path) -> None:
    made = settings(tmp_path)
    group = groups(made)[0]
    single = full_model.load(made)
    half = full_model.load(made.model_copy(update={"dtype": "bfloat16"}))
    for (_, one), (_, other) in zip(single.logprobs(group, 1.0), half.logprobs(group, 1.0), strict=True):
        assert other.dtype == torch.float32
        assert 1e-6 < float((one - other).detach().abs().max()) < 0.5


def test_the_template_of_the_run_is_the_models(tmp_path: Path) -> None:
    text = (tiny() / "chat_template.jinja").read_text() + "{# of this run #}"
    (tmp_path / "own.jinja").write_text(text)
    made = settings(tmp_path, maxSteps=1).model_copy(update={"template": str(tmp_path / "own.jinja")})
    policy = SFTRun(made).run()
    assert policy is not None
    assert (Path(policy.uri.removeprefix("file://")) / "chat_template.jinja").read_text() == text


def test_a_base_without_a_tokenizer_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored episodes are tokens already, so that nothing else reads the tokenizer before the end."""
    made = settings(tmp_path)
    items = load_items(made, made.train, "spec.data.train")

    def loaded(*_: object) -> list[Item]:
        return items

    monkeypatch.setattr("kestrl_learner.sft.training.load_items", loaded)
    shutil.copytree(tiny(), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(UserInputError, match=r"spec\.model\.base: .* has no tokenizer; add its files"):
        SFTRun(made.model_copy(update={"model": str(tmp_path / "model")}))


@pytest.mark.parametrize(
    ("field", "value"), [("rank", "4"), ("alpha", "3"), ("targets", "[q_proj]"), ("from", "file:///a/b")]
)
def test_fields_of_an_adapter_are_refused(tmp_path: Path, field: str, value: str) -> None:
    path = manifest(tmp_path)
    overrides = ["training.parameters=all", "model.adapter={}", f"model.adapter.{field}={value}"]
    with pytest.raises(ProblemsError, match=f"spec.model.adapter.{field}: there is no adapter with"):
        read_sft_job(path, tuple(overrides))
    filled_in = "model.adapter={rank: 8, alpha: 16, targets: all-linear}"  # by an API server
    assert read_sft_job(path, (*overrides[:1], filled_in)).spec.training.parameters == "all"


def test_the_learning_rate_has_a_default_for_what_is_trained(tmp_path: Path) -> None:
    path = manifest(tmp_path, learningRate=None)
    assert read_sft_job(path).spec.training.peak_learning_rate == 2e-4
    assert read_sft_job(path, ("training.parameters=all", "model.adapter={}")).spec.training.peak_learning_rate == 2e-5


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "spec.model.base: .*quantised"),
        ("generation_config.json", {"temperature": -1.0}, "spec.model.base: its generation_config.json is invalid"),
    ],
)
def test_a_base_that_cannot_be_trained_is_refused(
    tmp_path: Path, file: str, content: dict[str, Any], message: str
) -> None:
    shutil.copytree(tiny(), tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    made = settings(tmp_path).model_copy(update={"model": str(tmp_path / "model")})
    with pytest.raises(UserInputError, match=message):
        full_model.load(made)


def test_a_run_of_an_adapter_is_not_gone_on_with(tmp_path: Path) -> None:
    made = settings(tmp_path, maxSteps=1)
    assert SFTRun(made).run() is not None
    with pytest.raises(UserInputError, match="another model, data or optimiser"):
        SFTRun(made.model_copy(update={"parameters": "adapter", "rank": 4})).run()
