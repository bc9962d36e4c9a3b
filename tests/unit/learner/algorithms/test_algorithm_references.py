"""Algorithms against verl's own functions, in float64 to 1e-9 and in float32 to 1e-6."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learner.algorithms.verl_functions import verl_functions
from torch import Tensor

from kestrl._shared.plan.algorithm import CorrectionSettings
from kestrl.algorithms import RewardComponent, ScoredEpisode, TokenBatch, Totals
from kestrl_learner.algorithms import (
    AGGREGATIONS,
    CORRECTION_WEIGHTS,
    KL_ESTIMATORS,
    LOSSES,
    REJECTIONS,
    Bounds,
)
from kestrl_learner.algorithms.advantages import OF_REWARDS, gdpo

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


VERL = verl_functions()
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


class Padded:
    """The same random tokens as verl's padded matrices and as our flat batch."""

    def __init__(self, lengths: list[int], seed: int, dtype: torch.dtype, spread: float = 0.6) -> None:
        chance = torch.Generator().manual_seed(seed)
        shape = (len(lengths), max(lengths))
        self.mask = torch.tensor([[float(place < length) for place in range(shape[1])] for length in lengths]).to(dtype)
        draw = lambda: torch.rand(shape, generator=chance, dtype=torch.float64).to(dtype)  # noqa: E731
        self.logprobs = (-4.0 * draw() - 0.01).requires_grad_()
        self.behaviour = (self.logprobs + spread * (draw() - 0.5)).detach()
        self.old = (self.logprobs + spread * (draw() - 0.5)).detach()
        self.reference = (self.logprobs + spread * (draw() - 0.5)).detach()
        self.advantages = (2.0 * draw() - 1.0)[:, :1].expand(shape)
        self.lengths = lengths

    def flat(self, matrix: Tensor) -> Tensor:
        return matrix[self.mask > 0]

    def batch(self) -> TokenBatch:
        count = sum(self.lengths)
        numbers = torch.tensor([place for place, length in enumerate(self.lengths) for _ in range(length)])
        return TokenBatch(
            logprobs=self.flat(self.logprobs.detach().clone()).requires_grad_(),
            behaviour=self.flat(self.behaviour),
            old=self.flat(self.old),
            reference=None,
            advantages=self.flat(self.advantages),
            weights=torch.full((count,), 1.0 / count, dtype=self.mask.dtype),
            sequences=numbers,
            groups=torch.zeros(count, dtype=torch.long),
            totals=Totals(tokens=count, sequences=len(self.lengths), groups=1),
        )


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, slack: float = 0.0) -> None:
    bound = max(TOLERANCE[dtype], slack)
    torch.testing.assert_close(found.to(torch.float64), expected.to(torch.float64), rtol=bound, atol=bound)


# The loss of verl, its settings, and the loss of ours with its aggregation. verl's dppo_tv has no penalty and another
# value of equal gradient, so it is compared apart.
LOSS_NAMES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "seq_mean_token_mean": "seq-mean-token-mean",
}


def aggregated(losses: Tensor, lengths: list[int], aggregation: str, horizon: int) -> Tensor:
    totals = Totals(tokens=sum(lengths), sequences=len(lengths), groups=1)
    weights = [AGGREGATIONS[aggregation](length, totals, horizon) for length in lengths for _ in range(length)]
    return (torch.tensor(weights, dtype=losses.dtype) * losses).sum()


@DTYPES
@pytest.mark.parametrize("name", LOSS_NAMES)
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_losses_and_gradients_are_verls(name: str, dtype: torch.dtype, lengths: list[int], seed: int) -> None:
    data = Padded(lengths, seed, dtype)
    config = VERL.ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5, tau_pos=1.0, tau_neg=1.05
    )
    mode = "seq_mean_token_mean" if name == "sapo" else "token_mean"
    theirs, _ = getattr(VERL, f"compute_policy_loss_{LOSS_NAMES[name]}")(
        data.old, data.logprobs, data.advantages, data.mask, MODES[mode], config
    )
    theirs.backward()
    batch = data.batch()
    bounds = Bounds(low=0.2, high=0.28, dual=1.5 if name == "ppo_clip" else None)
    ours = aggregated(LOSSES[name](batch, batch.old, bounds), lengths, mode, 1)
    ours.backward()  # type: ignore[no-untyped-call]
    assert batch.logprobs.grad is not None
    assert data.logprobs.grad is not None
    # The aggregation that verl's SAPO is fixed to adds 1e-8 to the length of a sequence.
    slack = 2e-8 if name == "sapo" else 0.0
    close(ours.detach(), theirs.detach(), dtype, slack)
    close(batch.logprobs.grad, data.flat(data.logprobs.grad), dtype, slack)


@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_the_trust_region_of_dppo_is_verls(lengths: list[int], seed: int) -> None:
    """The gradient without our penalty, which prime-rl has and verl does not."""
    data = Padded(lengths, seed, torch.float64, spread=2.0)
    config = VERL.ActorConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)
    theirs, _ = VERL.compute_policy_loss_dppo_tv(
        data.behaviour, data.logprobs, data.advantages, data.mask, "token-sum", config
    )
    theirs.backward()
    batch = data.batch()
    losses = LOSSES["dppo_tv"](batch, batch.old, Bounds(low=0.2, high=0.2))
    (losses - 1e-3 * (batch.logprobs - batch.behaviour) ** 2).sum().backward()  # type: ignore[no-untyped-call]
    assert batch.logprobs.grad is not None
    assert data.logprobs.grad is not None
    close(batch.logprobs.grad, data.flat(data.logprobs.grad), torch.float64)


@DTYPES
@pytest.mark.parametrize("aggregation", MODES)
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_aggregations_are_verls(aggregation: str, dtype: torch.dtype, lengths: list[int], seed: int) -> None:
    data = Padded(lengths, seed, dtype)
    theirs = VERL.agg_loss(data.reference, data.mask, MODES[aggregation], loss_scale_factor=16)
    ours = aggregated(data.flat(data.reference), lengths, aggregation, 16)
    # verl adds 1e-8 to the length of a sequence.
    torch.testing.assert_close(ours, theirs, rtol=max(2e-8, TOLERANCE[dtype]), atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_are_verls(estimator: str, dtype: torch.dtype) -> None:
    data = Padded([5, 3, 8], 3, dtype, spread=3.0)
    theirs = VERL.kl_penalty_forward(data.logprobs, data.reference, estimator)
    close(KL_ESTIMATORS[estimator](data.logprobs, data.reference).detach(), theirs.detach(), dtype)


@DTYPES
@pytest.mark.parametrize("weights", ["token", "sequence", "icepop"])
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_correction_weights_are_verls(weights: str, dtype: torch.dtype, lengths: list[int], seed: int) -> None:
    data = Padded(lengths, seed, dtype, spread=3.0)
    theirs, _ = VERL.compute_rollout_correction_weights(
        data.old - data.behaviour,
        data.mask,
        rollout_is="sequence" if weights == "sequence" else "token",
        rollout_is_threshold="0.5_2.0" if weights == "icepop" else 2.0,
    )
    batch = data.batch()
    ours = CORRECTION_WEIGHTS[weights](batch.old - batch.behaviour, batch.sequences, CorrectionSettings())
    close(ours, data.flat(theirs), dtype)


@pytest.mark.parametrize(
    ("rejection", "option", "threshold"), [("geometric", "seq_mean_k1", "0.9_1.1"), ("k3", "seq_mean_k3", "0.02")]
)
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_rejections_are_verls(rejection: str, option: str, threshold: str, lengths: list[int], seed: int) -> None:
    data = Padded(lengths, seed, torch.float64)
    theirs, _ = VERL.compute_rollout_rejection_mask(data.old - data.behaviour, data.mask, option, threshold)
    batch = data.batch()
    # verl bounds the mean of -log rho, so that its bounds are those of 1 / rho.
    bounds = CorrectionSettings(reject_below=1 / 1.1, reject_above=1 / 0.9, reject_kl=0.02)
    ours = REJECTIONS[rejection](batch.old - batch.behaviour, batch.sequences, bounds)
    assert torch.equal(ours, data.flat(theirs))


GROUPS = st.lists(
    st.lists(st.floats(-5, 5), min_size=2, max_size=6).filter(lambda group: max(group) - min(group) > 1e-2),
    min_size=1,
    max_size=4,
)


def verl_advantages(name: str, groups: list[list[float]]) -> list[float]:
    rewards = torch.tensor([[reward] for group in groups for reward in group], dtype=torch.float64)
    index = np.array([str(number) for number, group in enumerate(groups) for _ in group])
    arguments: dict[str, Any] = {}
    if name in ("grpo", "dr_grpo"):
        arguments["norm_adv_by_std_in_grpo"] = name == "grpo"
    function = {
        "grpo": VERL.compute_grpo_outcome_advantage,
        "dr_grpo": VERL.compute_grpo_outcome_advantage,
        "rloo": VERL.compute_rloo_outcome_advantage,
        "reinforce++": VERL.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }[name]
    found, _ = function(rewards, torch.ones_like(rewards), index, **arguments)
    return [float(value) for value in found[:, 0]]


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
@given(groups=GROUPS)
@settings(max_examples=40, deadline=None)
def test_advantages_are_verls(name: str, groups: list[list[float]]) -> None:
    ours = [value for group in OF_REWARDS[name](groups) for value in group]
    assert ours == pytest.approx(verl_advantages(name, groups), rel=1e-9, abs=1e-9)


@given(groups=GROUPS)
@settings(max_examples=40, deadline=None)
def test_grpo_is_verls_but_for_the_sample_deviation(groups: list[list[float]]) -> None:
    """verl divides by the deviation with n - 1, DeepSeekMath and we by that with n."""
    theirs = iter(verl_advantages("grpo", groups))
    for group, ours in zip(groups, OF_REWARDS["grpo"](groups), strict=True):
        factor = (len(group) / (len(group) - 1)) ** 0.5
        assert [value / factor for value in ours] == pytest.approx([next(theirs) for _ in group], rel=1e-3)


@given(groups=GROUPS)
@settings(max_examples=40, deadline=None)
def test_reinforce_plus_plus_is_verls_but_for_the_deviation(groups: list[list[float]]) -> None:
    """verl whitens by sqrt(variance with n - 1, over tokens, + 1e-8)."""
    count = sum(map(len, groups))
    ours = [value * ((count - 1) / count) ** 0.5 for group in OF_REWARDS["reinforce++"](groups) for value in group]
    assert ours == pytest.approx(verl_advantages("reinforce++", groups), rel=1e-3, abs=1e-6)


COMPONENT = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])


@given(
    groups=st.lists(st.lists(st.tuples(COMPONENT, COMPONENT), min_size=4, max_size=4), min_size=1, max_size=4),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=40, deadline=None)
def test_gdpo_is_verls_but_for_the_deviation(groups: list[list[tuple[float, float]]], weight: float) -> None:
    """verl's deviations are those with n - 1; in groups of one size the components' factor cancels in the last."""
    every = [pair for group in groups for pair in group]
    columns = {"form": [form for form, _ in every], "answer": [answer for _, answer in every]}
    mask = torch.ones((len(every), 1), dtype=torch.float64)
    theirs, _ = VERL.compute_gdpo_outcome_advantage(
        torch.zeros_like(mask),
        mask,
        np.array([str(number) for number, group in enumerate(groups) for _ in group]),
        config={"gdpo_reward_keys": list(columns), "gdpo_reward_weights": [1.0, weight]},
        non_tensor_batch=columns,
        batch={
            "prompts": torch.zeros((len(every), 1)),
            "attention_mask": torch.ones((len(every), 2), dtype=torch.long),
        },
    )
    ours = [
        episode[0]
        for group in gdpo([[_episode(pair, weight) for pair in group] for group in groups])
        for episode in group
    ]
    factor = ((len(every) - 1) / len(every)) ** 0.5
    assert [value * factor for value in ours] == pytest.approx(theirs[:, 0].tolist(), rel=1e-3, abs=1e-5)


def _episode(components: tuple[float, float], weight: float) -> ScoredEpisode:
    form, answer = components
    return ScoredEpisode(
        reward=form + weight * answer,
        turns=[1],
        components={
            "form": RewardComponent(value=form, weight=1.0),
            "answer": RewardComponent(value=answer, weight=weight),
        },
    )
