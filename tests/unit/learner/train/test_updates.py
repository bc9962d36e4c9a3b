"""A step of one or several updates: learning rate, mini-batches, reference and old log-probs, diagnostics, and the
log-probs of tokens without the logits of a batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learner.train.test_training import algorithm, make_groups
from torch import nn

from kestrl._shared.plan.algorithm import CorrectionSettings
from kestrl.algorithms import ScoredEpisode
from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.model.head import token_logprobs
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train import trainer as trainer_module
from kestrl_learner.train.diagnostics import ratio_diagnostics, staleness_facts
from kestrl_learner.train.optimisation import learning_rate, mini_batches
from kestrl_learner.train.trainer import NotFinite, Trainer

Maker = Callable[..., PolicyModel]


# Learning rate and mini-batches


def test_the_cosine_falls_from_the_peak_to_its_final_share() -> None:
    """Against transformers' schedule, which counts the warm-up from 0 and ends after the last step."""
    given_settings = algorithm(
        learning_rate=2.0, learning_rate_schedule="cosine", final_learning_rate_share=0.1, warmup_steps=3
    )
    rates = [learning_rate(given_settings, step, 11) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.5]
    assert rates[3] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[5] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 7))))
    assert learning_rate(given_settings, 50, 11) == pytest.approx(0.2), "a step beyond the schedule"


def test_the_linear_schedule_is_transformers() -> None:
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=9)
    given_settings = algorithm(learning_rate=2.0, learning_rate_schedule="linear")
    for step in range(9):
        assert learning_rate(given_settings, step, 10) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@given(count=st.integers(1, 12), parts=st.integers(1, 12), epochs=st.integers(1, 3), step=st.integers(0, 99))
def test_every_group_is_in_one_mini_batch_an_epoch(count: int, parts: int, epochs: int, step: int) -> None:
    given_settings = algorithm(mini_batches=parts, mini_batch_epochs=epochs)
    found = list(mini_batches(range(count), given_settings, step))
    assert Counter(item for batch in found for item in batch) == dict.fromkeys(range(count), epochs)
    sizes = {len(batch) for batch in found}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert found == list(mini_batches(range(count), given_settings, step)), "a resumed run repeats a step"
    if parts == epochs == 1:
        assert found == [list(range(count))]


def test_mini_batches_are_the_same_updates_as_steps_of_their_own(policy_of: Maker, models: dict[str, Path]) -> None:
    """With a loss that does not look at the old policy, two mini-batches equal two steps of half the groups."""
    settings_of_step = algorithm(loss="dppo_tv", mini_batches=2)
    groups = make_groups(count=4)
    at_once = Trainer(policy_of(models["qwen3"]), settings_of_step, 1.0)
    result = at_once.step(groups, 5)
    one_by_one = Trainer(policy_of(models["qwen3"]), algorithm(loss="dppo_tv"), 1.0)
    losses = [one_by_one.step(part, 5).loss for part in mini_batches(groups, settings_of_step, 5)]
    assert result.loss == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert result.diagnostics["updates"] == 2
    for ours, theirs in zip(at_once.model.parameters(), one_by_one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_old_policy_of_several_updates_is_the_first_one(policy_of: Maker, models: dict[str, Path]) -> None:
    """Decoupled, with weights of 1: the second epoch's ratio is to the weights before the first update, so that a clip
    of almost nothing stops the tokens that moved along their advantage.
    """
    correction = CorrectionSettings(decoupled=True, weights="none")
    clip = {"clip_low": 1e-7, "clip_high": 1e-7, "learning_rate": 1e-2}
    policy = policy_of(models["qwen3"], disturb=0.3)
    first = Trainer(policy, algorithm(correction=correction, mini_batch_epochs=1, **clip), 1.0).step(make_groups(), 0)
    again = Trainer(
        policy_of(models["qwen3"], disturb=0.3), algorithm(correction=correction, mini_batch_epochs=2, **clip), 1.0
    ).step(make_groups(), 0)
    assert first.diagnostics["clip_fraction"] == 0.0
    assert again.diagnostics["clip_fraction"] > 0.2
    assert again.mismatch.own.mean == pytest.approx(first.mismatch.own.mean, rel=1e-4), "measured before any update"


def test_an_update_that_is_not_finite_undoes_those_before_it(
    policy_of: Maker, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(models["qwen3"])
    trainer = Trainer(policy, algorithm(mini_batches=3), 1.0)
    trainer.step(make_groups(), 0)
    weights = [weight.detach().clone() for weight in policy.parameters()]
    moments = [state["exp_avg"].clone() for state in trainer.optimizer.state.values()]
    plain, calls = trainer.algorithm.loss, [0]

    def broken(batch: Any) -> torch.Tensor:
        calls[0] += 1
        return plain(batch) * (float("nan") if calls[0] == 3 else 1.0)

    monkeypatch.setattr(trainer.algorithm, "loss", broken)
    with pytest.raises(NotFinite, match="learningRate"):
        trainer.step(make_groups(), 1)
    assert all(torch.equal(now, before) for now, before in zip(policy.parameters(), weights, strict=True))
    restored = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert all(torch.equal(now, before) for now, before in zip(restored, moments, strict=True))


# KL in the reward


def test_kl_in_the_reward_is_the_slow_sum_over_the_tokens(
    policy_of: Maker, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    given_settings = algorithm(advantage="dr_grpo", kl_coefficient=0.5, kl_estimator="k1", kl_place="reward")
    trainer = Trainer(policy, given_settings, 0.7)
    (group,) = make_groups(count=1, advantage=0.0)
    episodes = [ScoredEpisode(reward=float(number), turns=[sum(row.mask)]) for number, row in enumerate(group.rows)]
    group = replace(group, episodes=episodes)
    expected: list[float] = []
    for number, row in enumerate(group.rows):
        alone = TrainGroup(id="alone", prompt=group.prompt, rows=[row])
        (reference,) = policy.reference_logprobs(alone, 0.7)
        behaviour = [value for value, on in zip(row.behaviour, row.mask, strict=True) if on]
        expected.append(number - 0.5 * sum(mu - float(ref) for mu, ref in zip(behaviour, reference, strict=True)))
    seen: list[TrainRow] = []
    plain = trainer_module.token_batch

    def recorded(pieces: Any, **others: Any) -> Any:
        seen.extend(row for piece in pieces for row in piece.rows)
        return plain(pieces, **others)

    monkeypatch.setattr(trainer_module, "token_batch", recorded)
    trainer.step([group], 0)
    mean = sum(expected) / len(expected)
    found = {row.sequence: {value for value, on in zip(row.advantages, row.mask, strict=True) if on} for row in seen}
    for number, reward in enumerate(expected):
        (advantage,) = found[number]
        assert advantage == pytest.approx(reward - mean, abs=1e-5)


# Diagnostics


def test_the_diagnostics_of_a_step(policy_of: Maker, models: dict[str, Path]) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    groups = [*make_groups(count=2), *make_groups(count=1, advantage=0.0)]
    entropies: list[torch.Tensor] = []
    with torch.no_grad():
        parts = [part for group in groups for _, part in policy.logprobs(group, 1.0, entropies)]
    logprobs = torch.cat(parts)
    result = Trainer(policy, algorithm(), 1.0).step(groups, 0).diagnostics
    ratios = (logprobs + 4.0).exp()
    assert result["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    assert 0 < result["entropy"] <= math.log(64)
    assert result["kl_behaviour"] == pytest.approx(float((ratios - 1 - ratios.log()).mean()), rel=1e-4)
    assert result["ess"] == pytest.approx(float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)), rel=1e-4)
    assert result["ratio_min"] == pytest.approx(float(ratios.min()), rel=1e-4)
    assert result["ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert result["ratio_min"] <= result["ratio_p01"] <= result["ratio_p50"] <= result["ratio_p99"]
    assert result["zero_advantage_share"] == pytest.approx(1 / 3)
    assert result["learning_rate"] == 1e-2
    assert 0 <= result["clip_fraction"] <= 1
    assert (result["rejected"], result["correction_weight"]) == (0.0, 1.0)


def test_no_tokens_have_no_ratio() -> None:
    assert ratio_diagnostics(torch.empty(0)) == {}


def test_staleness_is_a_histogram_and_a_share_of_the_time() -> None:
    def group(*spans: tuple[float, float]) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(
            episodes=[SimpleNamespace(started_at=begin, seconds=end - begin) for begin, end in spans]
        )

    ages = [{0: 5}, {2: 4, 0: 3, 1: 2}, {0: 1}]
    facts = staleness_facts(ages, [group((0, 10), (5, 30)), group((0, 10)), group()], stale_seconds=10.0)
    tokens = {"0": 9, "1": 2, "2": 4}
    assert facts == {"by_staleness": {"0": 2, "2": 1}, "tokens_by_staleness": tokens, "stale_share": 0.2}
    assert staleness_facts([], [], 0.0) == {"by_staleness": {}, "tokens_by_staleness": {}, "stale_share": 0.0}


# Log-probs without the logits of a batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["frozen", "bias", "trained"])
@given(count=st.integers(0, 9), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_chunked_logprobs_equal_those_of_the_full_logits(kind: str, dtype: torch.dtype, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    head = nn.Linear(6, 11, bias=kind == "bias").to(dtype)
    head.requires_grad_(kind == "trained")
    hidden = torch.randn(count, 6, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 11, (count,))
    entropies: list[torch.Tensor] = []
    found = token_logprobs(head, hidden, targets, 0.7, entropies, at_once=22)  # two tokens at a time
    slow = hidden.detach().clone().requires_grad_()
    logits = head(slow)
    every = torch.log_softmax(logits.to(torch.promote_types(dtype, torch.float32)) / 0.7, -1)
    expected = every.gather(-1, targets[:, None])[:, 0]
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(entropies[0], -(every.exp() * every).sum(-1), rtol=bound, atol=bound)
    scale = torch.randn(count, dtype=found.dtype)
    (found * scale).sum().backward()
    (expected * scale).sum().backward()
    assert hidden.grad is not None
    assert slow.grad is not None
    torch.testing.assert_close(hidden.grad, slow.grad, rtol=bound, atol=5 * bound)
