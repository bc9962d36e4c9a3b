"""The model under training: the base as engines have it."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.learner.fakes import VOCABULARY, wide_model
from tests.unit.learner.train.test_training import algorithm, gradients, make_groups
from transformers import GPT2Config, GPT2LMHeadModel

from kestrl.errors import UserInputError
from kestrl_learner.model import trained_model
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.sft.encoding import train_row
from kestrl_learner.sft.training import as_group
from kestrl_learner.train.trainer import Trainer


def scores_twice(policy: PolicyModel) -> None:
    ids = [1, 5, 9, 2, 7, 3]
    for adapter in (False, True):
        assert policy.score(ids, adapter=adapter) == policy.score(ids, adapter=adapter)


def test_dropout_of_a_base_is_off(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = policy_of(folder)
    scores_twice(policy)
    assert policy.score([1, 5, 9], adapter=False) == policy_of(models["llama"]).score([1, 5, 9], adapter=False)


def test_gpt2_whose_dropout_is_on_by_default_can_be_trained(
    policy_of: Callable[..., PolicyModel], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = policy_of(tmp_path)
    scores_twice(policy)
    assert policy.parameters()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_checkpointed_layers_give_the_gradient_of_the_shared_prompt(
    kind: str, models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    groups = make_groups()
    shared, gradient = gradients(policy_of(models[kind], disturb=0.3), groups)
    policy = policy_of(models[kind], disturb=0.3, gradient_checkpointing=True)
    found, checkpointed = gradients(policy, groups)
    torch.testing.assert_close(torch.cat(found), torch.cat(shared), rtol=0, atol=2e-6)
    for one, other in zip(checkpointed, gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max() + 1e-6))
    policy.tokens_per_pass = 20
    again, _ = gradients(policy, groups)
    torch.testing.assert_close(torch.cat(again), torch.cat(shared), rtol=0, atol=2e-6)
    parts = policy.passes([*enumerate(groups)])
    assert len(parts) > len(groups)
    dropouts = [module for module in policy.peft.modules() if isinstance(module, torch.nn.Dropout)]
    assert not any(module.training for module in dropouts)


def saved_elements(policy: PolicyModel) -> int:
    """Numbers that the forward pass of one group keeps for its backward pass, weights aside."""
    weights = {weight.data_ptr() for weight in policy.peft.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    (group,) = make_groups(count=1, size=8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = [logprobs for _, logprobs in policy.logprobs(group, 1.0)]
    gc.collect()
    assert results
    return sum(kept.values())


def test_checkpointing_keeps_less_and_no_logits_are_kept(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    plain = saved_elements(policy_of(models["qwen3"]))
    checkpointed = saved_elements(policy_of(models["qwen3"], gradient_checkpointing=True))
    assert checkpointed < plain / 2
    of_first = saved_elements(policy_of(models["qwen3"], gradient_checkpointing=True, checkpointed_layers=1))
    assert checkpointed < of_first < plain


def test_more_checkpointed_layers_than_the_model_has_are_refused(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    with pytest.raises(UserInputError, match="checkpointedLayers is 3, and the model has 2 layers"):
        policy_of(models["qwen3"], gradient_checkpointing=True, checkpointed_layers=3)


def test_offloaded_inputs_of_layers_give_the_same_gradient(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.Size] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            def leave(saved: torch.Tensor) -> torch.Tensor:
                moved.append(saved.shape)
                return saved.clone()

            assert not pin_memory
            super().__init__(leave, lambda kept: kept)

    monkeypatch.setattr(trained_model, "save_on_cpu", Recorded)
    groups = make_groups()
    kept = gradients(policy_of(models["qwen3"], disturb=0.3, gradient_checkpointing=True), groups)
    assert not moved
    offloading = policy_of(models["qwen3"], disturb=0.3, gradient_checkpointing=True, activation_offload=True)
    found = gradients(offloading, groups)
    for some, others in zip(found, kept, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
    assert sum(len(shape) == 3 and shape[-1] == 32 for shape in moved) >= 2 * len(groups), "an input for each layer"


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_offloading_lowers_the_peak_of_a_gpu(tmp_path: Path, policy_of: Callable[..., PolicyModel]) -> None:
    """A model of many narrow layers, so that their inputs are most of the peak: 64 MiB of 16 inputs of 4,096 tokens."""
    layers, hidden, tokens = 16, 256, 4096
    shape = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers, "head_dim": 64}
    folder = wide_model(tmp_path, **shape)
    chance = random.Random(3)
    ids = [chance.randrange(1, VOCABULARY) for _ in range(tokens // 8)]
    group = as_group([[train_row(ids, [0] + [1] * (len(ids) - 1), 0)] for _ in range(8)])
    peaks: list[int] = []
    found: list[list[torch.Tensor]] = []
    for offload in (False, True):
        policy = policy_of(folder, device="cuda", gradient_checkpointing=True, activation_offload=offload)
        gradients(policy, [group])  # what is allocated once
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append([slope.cpu() for slope in gradients(policy, [group])[1]])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    inputs = 4 * layers * hidden * tokens
    assert peaks[0] - peaks[1] > inputs / 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_bfloat16_base_has_a_float32_adapter_and_learns(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    policy = policy_of(models["qwen3"], dtype="bfloat16", gradient_checkpointing=True)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    frozen = {weight.dtype for weight in policy.peft.parameters() if not weight.requires_grad}
    assert frozen == {torch.bfloat16}
    result = Trainer(policy, algorithm(), 1.0).step(make_groups(), 0)
    assert 0 < result.grad_norm < float("inf")
