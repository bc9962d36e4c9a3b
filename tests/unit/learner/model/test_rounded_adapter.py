"""Adapters of a bfloat16 base that passes compute with in bfloat16: gradients, copies, small updates."""
# torch has loose types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.learner.fakes import VOCABULARY, make_policy, wide_model
from tests.unit.learner.model.test_model import saved_elements
from tests.unit.learner.ranks.forked_ranks import on_ranks
from tests.unit.learner.train.test_training import algorithm, gradients, make_groups
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from kestrl_learner.model import rounded_adapter
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.model.rounded_adapter import RoundedLinear, rounded_copies, rounds_adapter
from kestrl_learner.ranks.group import RankGroup
from kestrl_learner.train.trainer import Trainer

Maker = Callable[..., PolicyModel]
NOISE = 1.15
"""Factor by which the mean error of two computations in bfloat16 differs by chance in these tests."""


def pair(folder: Path, **options: Any) -> tuple[PolicyModel, PolicyModel]:
    """The same bfloat16 base and adapter, of which passes compute in float32 and in bfloat16."""
    exact, rounded = (make_policy(folder, dtype="bfloat16", rounded=rounded, **options) for rounded in (False, True))
    rounded.load_trained_state(exact.trained_state())
    return exact, rounded


def in_float64(policy: PolicyModel, folder: Path, rank: int, **options: Any) -> PolicyModel:
    """The weights of a model, computed in float64."""
    reference = make_policy(folder, rank=rank, **options)
    reference.network.double()
    take_weights(reference, policy)
    return reference


@torch.no_grad()
def take_weights(policy: PolicyModel, other: PolicyModel) -> None:
    weights = dict(other.network.named_parameters())
    for name, weight in policy.network.named_parameters():
        weight.copy_(weights[name])


@torch.no_grad()
def draw(policy: PolicyModel, seed: int, size: float) -> None:
    """Another random adapter.

    Args:
        policy: Whose adapter is replaced.
        seed: Of the numbers.
        size: Standard deviation of B.
    """
    random = torch.Generator().manual_seed(seed)
    for name, weight in policy.network.named_parameters():
        if "lora_" in name:
            scale = size if "lora_B" in name else (3 * weight.shape[1]) ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=random) * scale)


def errors(policy: PolicyModel, reference: PolicyModel, seed: int) -> tuple[float, float]:
    """Mean error of log-probs in nats, and the relative error of the gradient."""
    groups = make_groups(size=6, seed=seed)
    found, gradient = gradients(policy, groups)
    expected, right = gradients(reference, groups)
    assert {part.dtype for part in gradient} == {torch.float32}
    ours, theirs = (torch.cat([part.flatten().double() for part in parts]) for parts in (gradient, right))
    gap = float((torch.cat(found) - torch.cat(expected)).abs().mean())
    return gap, float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_errors_are_those_of_a_float32_adapter(rank: int, checkpointing: bool, models: dict[str, Path]) -> None:
    """Against float64, with an adapter that changes what a layer computes by a third."""
    folder, options = models["qwen3"], {"gradient_checkpointing": checkpointing}
    policies = pair(folder, rank=rank, **options)
    reference = in_float64(policies[0], folder, rank, **options)
    sums = torch.zeros(2, 2)
    for seed in range(8):
        for policy in policies:
            draw(policy, seed, 0.007 * rank**0.5)
        take_weights(reference, policies[0])
        sums += torch.tensor([errors(policy, reference, seed) for policy in policies])
    exact, rounded = sums / 8
    assert (rounded <= NOISE * exact).all(), (exact, rounded)
    assert (exact > 0).all()


def test_scores_are_those_of_the_adapter_that_an_engine_loads_in_bfloat16(models: dict[str, Path]) -> None:
    """Bit by bit those of the rounded weights, unlike the scores of a float32 adapter."""
    exact, rounded = pair(models["qwen3"], disturb=0.3)
    loaded = {name: weight.bfloat16().float() for name, weight in rounded.trained_state().items()}
    ids = [1, 5, 9, 2, 7, 3, 30, 40]
    before = rounded.score(ids, adapter=True), exact.score(ids, adapter=True)
    for policy in (exact, rounded):
        policy.load_trained_state(loaded)
    assert rounded.score(ids, adapter=True) == before[0]
    assert exact.score(ids, adapter=True) != before[1]


@pytest.mark.parametrize("rounded", [None, True, False])
def test_a_float32_base_computes_as_before(rounded: bool | None, models: dict[str, Path]) -> None:
    """Bit by bit as by peft's own layers."""
    plain = make_policy(models["qwen3"], disturb=0.3, rounded=False)
    other = make_policy(models["qwen3"], disturb=0.3, rounded=rounded)
    assert not any(isinstance(module, RoundedLinear) for module in other.network.modules())
    for some, others in zip(gradients(plain, make_groups()), gradients(other, make_groups()), strict=True):
        assert all(torch.equal(one, same) for one, same in zip(some, others, strict=True))


def test_devices_other_than_a_cpu_round_the_adapter_of_a_bfloat16_base() -> None:
    assert rounds_adapter("bfloat16", "cuda:1")
    assert not rounds_adapter("bfloat16", "cpu")
    assert not rounds_adapter("float32", "cuda")


# Copies


@pytest.fixture
def rounded_layers(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The matrices A that were copied, in order."""
    copied: list[Tensor] = []

    def recorded(low: Tensor, high: Tensor, scaling: float) -> Any:
        copied.append(low)
        return rounded_copies(low, high, scaling)

    monkeypatch.setattr(rounded_adapter, "rounded_copies", recorded)
    return copied


def layers_of(policy: PolicyModel) -> list[RoundedLinear]:
    return [module for module in policy.network.modules() if isinstance(module, RoundedLinear)]


def assert_copied(policy: PolicyModel) -> None:
    """Copies are the weights as they are."""
    for layer in layers_of(policy):
        low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert layer.copies is not None
        assert torch.equal(layer.copies.low, low.bfloat16())
        assert torch.equal(layer.copies.high, (high * layer.scaling["default"]).bfloat16())


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_copies_each_layer_once(foreach: bool, models: dict[str, Path], rounded_layers: list[Tensor]) -> None:
    policy = make_policy(
        models["qwen3"], dtype="bfloat16", rounded=True, gradient_checkpointing=True, tokens_per_pass=24
    )
    trainer = Trainer(policy, algorithm(), 1.0)
    trainer.optimizer.param_groups[0]["foreach"] = foreach
    layers = len(layers_of(policy))
    assert layers == 14
    assert len(policy.passes([*enumerate(make_groups())])) > 1
    policy.score([1, 2, 3], adapter=True)
    rounded_layers.clear()
    trainer.step(make_groups(), 0)
    assert not rounded_layers, "the weights before the update are known"
    for step in (1, 2):
        trainer.step(make_groups(), step)
        assert len(rounded_layers) == len({id(low) for low in rounded_layers}) == layers
        rounded_layers.clear()
    policy.score([1, 2, 3], adapter=True)
    policy.score([1, 2, 3], adapter=True)
    assert len(rounded_layers) == layers
    assert_copied(policy)


def test_mini_batches_copy_once_an_update_and_an_undone_step_again(
    models: dict[str, Path], rounded_layers: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(models["qwen3"], dtype="bfloat16", rounded=True)
    trainer = Trainer(policy, algorithm(mini_batches=3), 1.0)
    ids = [1, 2, 3]
    before = policy.score(ids, adapter=True)
    rounded_layers.clear()
    trainer.step(make_groups(), 0)
    assert len(rounded_layers) == 2 * len(layers_of(policy)), "before the second and the third update"
    after = policy.score(ids, adapter=True)
    assert after != before
    plain, calls = trainer.algorithm.loss, [0]

    def broken(batch: Any) -> Tensor:
        calls[0] += 1
        return plain(batch) * (float("nan") if calls[0] == 3 else 1.0)

    monkeypatch.setattr(trainer.algorithm, "loss", broken)
    with pytest.raises(Exception, match="learningRate"):
        trainer.step(make_groups(), 1)
    assert policy.score(ids, adapter=True) == after
    assert_copied(policy)


def test_an_optimizer_that_does_not_count_its_changes_is_noticed(models: dict[str, Path]) -> None:
    policy = make_policy(models["qwen3"], dtype="bfloat16", rounded=True)
    trainer = Trainer(policy, algorithm(), 1.0)
    trainer.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=True)
    before = policy.score([1, 2, 3], adapter=True)
    trainer.step(make_groups(), 0)
    assert policy.score([1, 2, 3], adapter=True) != before
    assert_copied(policy)


def test_loaded_weights_are_copied_and_the_base_has_none(models: dict[str, Path]) -> None:
    first, second = (make_policy(models["qwen3"], dtype="bfloat16", rounded=True, seed=seed) for seed in (1, 2))
    base = first.score([1, 5, 9, 2], adapter=False)
    assert first.score([1, 5, 9, 2], adapter=True) == base, "version 0 is the base"
    Trainer(second, algorithm(), 1.0).step(make_groups(), 0)
    learned = second.score([1, 5, 9, 2], adapter=True)
    with first.with_trained_state(second.trained_state()):
        assert first.score([1, 5, 9, 2], adapter=True) == learned
        assert first.score([1, 5, 9, 2], adapter=False) == base
    assert first.score([1, 5, 9, 2], adapter=True) == base


def test_a_restored_trainer_goes_on_exactly(models: dict[str, Path]) -> None:
    one, other = (Trainer(make_policy(models["qwen3"], dtype="bfloat16", rounded=True), algorithm(), 1.0) for _ in "ab")
    one.step(make_groups(seed=1), 0)
    other.model.pass_logprobs(other.model.passes([*enumerate(make_groups())])[0], 1.0, None)  # with copies of its own
    other.restore(one.state())
    for step in (1, 2):
        assert one.step(make_groups(seed=step), step).loss == other.step(make_groups(seed=step), step).loss
    assert one.state() == other.state()


# What is learned


def test_updates_below_the_resolution_of_bfloat16_add_up(models: dict[str, Path]) -> None:
    """Each is an eighth of what bfloat16 can tell from the weight; after 32 the copies have moved, too."""
    policy = make_policy(models["qwen3"], dtype="bfloat16", rounded=True, disturb=0.3)
    layer = layers_of(policy)[0]
    weight = layer.lora_A["default"].weight
    with torch.no_grad():
        weight.fill_(1.0)
    rate = 2**-10
    trainer = Trainer(policy, algorithm(learning_rate=rate), 1.0)
    start, moved_at = weight.detach().clone(), None
    for step in range(32):
        before = weight.detach().clone()
        trainer.step(make_groups(seed=step), step)
        assert (weight != before).any()
        policy.score([1, 2, 3], adapter=True)
        assert layer.copies is not None
        if moved_at is None and (layer.copies.low != 1.0).any():
            moved_at = step
    assert weight.dtype == torch.float32
    assert float((weight.detach() - start).abs().max()) > 4 * rate
    assert moved_at is not None
    assert moved_at > 0, "the first update alone is lost in the copies"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_goes_where_a_float32_adapter_goes(checkpointing: bool, models: dict[str, Path]) -> None:
    """The distance that 12 steps moved is many times the one between the two."""
    policies = pair(models["qwen3"], disturb=0.3, gradient_checkpointing=checkpointing)
    start = copy.deepcopy(policies[0].trained_state())
    for policy in policies:
        trainer = Trainer(policy, algorithm(learning_rate=1e-3, loss="dppo_tv"), 1.0)
        for step in range(12):
            trainer.step(make_groups(seed=step), step)
    exact, rounded = (policy.trained_state() for policy in policies)
    moved = sum(float((exact[name] - start[name]).square().sum()) for name in start) ** 0.5
    distance = sum(float((exact[name] - rounded[name]).square().sum()) for name in start) ** 0.5
    assert distance < 0.15 * moved


# Layers, ranks


def test_layers_that_are_not_linear_keep_peft_s_computation_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, rounded_adapter.__name__):
        policy = make_policy(tmp_path, dtype="bfloat16", rounded=True, disturb=0.1)
    assert "0 of 4 layers compute with their adapter in bfloat16" in caplog.text
    assert "4 layers (Conv1D) compute with their adapter in float32" in caplog.text
    assert Trainer(policy, algorithm(), 1.0).step(make_groups(), 0).grad_norm > 0


def steps_on(ranks: Any, folder: Path) -> dict[str, Any]:
    """What two steps change, with and without gradient checkpointing."""
    group = ranks if isinstance(ranks, RankGroup) else None
    weights: dict[str, Any] = {}
    for checkpointing in (False, True):
        options = {"gradient_checkpointing": checkpointing, "tokens_per_pass": 24}
        policy = make_policy(folder, dtype="bfloat16", rounded=True, group=group, **options)
        assert layers_of(policy)
        draw(policy, 1, 0.1)
        start = copy.deepcopy(policy.trained_state())
        trainer = Trainer(policy, algorithm(learning_rate=1e-3), 1.0, ranks=group)
        for step in range(2):
            trainer.step(make_groups(seed=step), step)
        changes = {name: weight - start[name] for name, weight in policy.trained_state().items()}
        weights |= {f"{name}/{checkpointing}": change.numpy() for name, change in changes.items()}
    return weights


@pytest.mark.timeout(300)
def test_two_ranks_take_the_step_of_one(models: dict[str, Path]) -> None:
    alone = steps_on(None, models["qwen3"])
    together = on_ranks(2, steps_on, models["qwen3"])
    for found in together:
        assert not isinstance(found, BaseException), found
        assert all((found[name] == together[0][name]).all() for name in alone), "ranks stay equal"
        moved = sum((change**2).sum() for change in alone.values()) ** 0.5
        distance = sum(((found[name] - change) ** 2).sum() for name, change in alone.items()) ** 0.5
        assert moved > 0
        assert distance < 0.15 * moved


# What it saves


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_casts_and_operations_of_a_pass_are_fewer(models: dict[str, Path]) -> None:
    counts: list[Counter[str]] = []
    groups = make_groups(count=1)
    for policy in pair(models["qwen3"], disturb=0.3, gradient_checkpointing=True):
        gradients(policy, groups)
        with torch.autograd.set_multithreading_enabled(False), Operations() as operations:
            gradients(policy, groups)
        counts.append(operations.names)
    exact, rounded = counts
    assert rounded["_to_copy"] < 0.7 * exact["_to_copy"]
    assert rounded["mul"] < exact["mul"]
    assert rounded.total() < 0.85 * exact.total()


def test_a_pass_keeps_no_float32_inputs_of_the_adapter(tmp_path: Path) -> None:
    exact, rounded = map(saved_elements, pair(wide_model(tmp_path, hidden_size=256, intermediate_size=512)))
    assert rounded < 0.7 * exact


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_gradients_of_a_rounded_adapter_on_a_gpu(tmp_path: Path) -> None:
    """By default, within the error of a float32 adapter; copies follow the updates of the default optimiser."""
    folder = wide_model(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64)
    options = {"device": "cuda", "gradient_checkpointing": True}
    exact = make_policy(folder, dtype="bfloat16", rounded=False, disturb=0.1, **options)
    rounded = make_policy(folder, dtype="bfloat16", **options)
    assert len(layers_of(rounded)) == 28
    rounded.load_trained_state(exact.trained_state())
    reference = in_float64(exact, folder, 4)
    groups = [replace(group, prompt=array("i", range(1, 41))) for group in make_groups(size=8)]
    expected, right = gradients(reference, groups)
    slope = torch.cat([part.flatten() for part in right])
    gaps: list[Tensor] = []
    for policy in (exact, rounded):
        found, gradient = gradients(policy, groups)
        ours = torch.cat([part.flatten().cpu().double() for part in gradient])
        gap = (torch.cat(found).cpu() - torch.cat(expected)).abs().mean()
        gaps.append(torch.stack([gap, (ours - slope).norm() / slope.norm()]))
    assert (gaps[1] <= 1.5 * gaps[0]).all(), gaps
    Trainer(rounded, algorithm(), 1.0).step(groups, 0)
    rounded.score([1, 2, 3], adapter=True)
    assert_copied(rounded)
