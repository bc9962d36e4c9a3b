"""Algorithms against slow transcriptions of their papers' formulas, token by token in float64, and the conformance
suite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrl._shared.plan.algorithm import CorrectionSettings
from kestrl._shared.plan.updates import algorithm_settings
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.algorithms import ADVANTAGES as ADVANTAGE_NAMES
from kestrl._shared.spec.algorithms import AGGREGATIONS as AGGREGATION_NAMES
from kestrl._shared.spec.algorithms import CORRECTION_WEIGHTS as WEIGHT_NAMES
from kestrl._shared.spec.algorithms import KL_ESTIMATORS as KL_NAMES
from kestrl._shared.spec.algorithms import LOSSES as DECLARED_LOSSES
from kestrl._shared.spec.algorithms import PRESETS
from kestrl._shared.spec.algorithms import REJECTIONS as REJECTION_NAMES
from kestrl.algorithms import RewardComponent, ScoredEpisode, TokenBatch, Totals
from kestrl.errors import UserCodeError, UserInputError
from kestrl.testing.algorithms import check_algorithm
from kestrl_learner.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTION_WEIGHTS,
    KL_ESTIMATORS,
    LOSSES,
    REJECTIONS,
    Bounds,
    make_algorithm,
)
from kestrl_learner.algorithms.advantages import OF_REWARDS, equal, grpo, rloo
from kestrl_learner.algorithms.losses import ppo_clip

BOUNDS = Bounds(low=0.2, high=0.28)
Token = tuple[float, float, float, int]
"""Log-probability, behaviour, advantage, episode."""
rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)
tokens = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-8, -0.01), st.floats(-3, 3), st.integers(0, 2)), min_size=1, max_size=12
)


def settings_of(**algorithm: Any) -> Any:
    """Settings as a manifest makes them."""
    manifest = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"base": "/model"},
            "data": {"train": {"uri": "/data.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
            "algorithm": algorithm,
        },
    }
    return algorithm_settings(AgentRLJob.model_validate(manifest).spec)


def batch_of(given_tokens: list[Token], reference: list[float] | None = None, **changes: Any) -> TokenBatch:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*given_tokens, strict=True)]
    logprobs, behaviour, advantages, sequences = columns
    count = len(given_tokens)
    made = TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour=behaviour,
        old=logprobs,
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        advantages=advantages,
        weights=torch.full((count,), 1.0 / count, dtype=torch.float64),
        sequences=torch.unique(sequences.long(), return_inverse=True)[1],
        groups=torch.zeros(count, dtype=torch.long),
        totals=Totals(tokens=count, sequences=3, groups=1),
    )
    return replace(made, **changes)


# Advantages


def slow_advantages(name: str, batch: list[list[float]]) -> list[list[float]]:
    every = [reward - statistics.fmean(group) for group in batch for reward in group]
    found: list[list[float]] = []
    for group in batch:
        mean = statistics.fmean(group)
        if name == "grpo":
            found.append([(reward - mean) / (statistics.pstdev(group) + 1e-6) for reward in group])
        elif name == "dr_grpo":
            found.append([reward - mean for reward in group])
        elif name == "reinforce++":
            found.append([(reward - mean) / (statistics.pstdev(every) + 1e-6) for reward in group])
        elif name == "maxrl":
            found.append([(reward - mean) / mean if mean > 1e-6 else 0.0 for reward in group])
        else:
            others = [[value for place, value in enumerate(group) if place != own] for own in range(len(group))]
            found.append([reward - statistics.fmean(rest) for reward, rest in zip(group, others, strict=True)])
    return found


@pytest.mark.parametrize("name", sorted(OF_REWARDS))
@given(batch=st.lists(rewards, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_advantages_follow_their_formulas(name: str, batch: list[list[float]]) -> None:
    if any(max(group) - min(group) <= 1e-3 for group in batch):
        return
    for found, expected in zip(OF_REWARDS[name](batch), slow_advantages(name, batch), strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", sorted(OF_REWARDS))
@pytest.mark.parametrize("group", [[], [0.7], [0.1 + 0.2, 0.3], [1.0] * 5], ids=["none", "one", "rounding", "equal"])
def test_a_group_with_nothing_to_compare_has_no_advantage(name: str, group: list[float]) -> None:
    assert OF_REWARDS[name]([group]) == [[0.0] * len(group)]


def test_known_advantages_of_two_episodes() -> None:
    assert grpo([[0.0, 1.0]])[0] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert rloo([[0.0, 1.0]]) == [[-1.0, 1.0]]


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=8))
def test_every_accepted_reward_has_a_finite_advantage(group: list[float]) -> None:
    for estimator in OF_REWARDS.values():
        assert all(math.isfinite(value) for value in estimator([group])[0])


def test_rewards_whose_squares_overflow_are_standardised() -> None:
    assert grpo([[1e200, -1e200]])[0] == pytest.approx([1.0, -1.0])


episodes = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.tuples(st.integers(0, 3), st.floats(-1, 1)), min_size=1, max_size=4)),
    min_size=2,
    max_size=5,
)


@given(given_episodes=episodes)
@settings(max_examples=80, deadline=None)
def test_rewards_of_turns_follow_deepseekmath(given_episodes: list[tuple[float, list[tuple[int, float]]]]) -> None:
    """Sections 4.1.2 and 4.1.3 token by token: the outcome's advantage, and the sum over later steps' rewards."""
    steps = [reward for _, turns in given_episodes for _, reward in turns]
    outcomes = [outcome for outcome, _ in given_episodes]
    if max(steps) - min(steps) <= 1e-3 or max(outcomes) - min(outcomes) <= 1e-3:
        return
    batch = [
        [
            ScoredEpisode(
                reward=outcome + math.fsum(reward for _, reward in turns),
                turns=[count for count, _ in turns],
                turn_rewards=[reward for _, reward in turns],
            )
            for outcome, turns in given_episodes
        ]
    ]
    found = make_algorithm(settings_of()).advantages(batch)[0]
    for (outcome, turns), advantages in zip(given_episodes, found, strict=True):
        expected: list[float] = []
        for index, (count, _) in enumerate(turns):
            normalised = [
                (reward - statistics.fmean(steps)) / (statistics.pstdev(steps) + 1e-6) for _, reward in turns[index:]
            ]
            own = (outcome - statistics.fmean(outcomes)) / (statistics.pstdev(outcomes) + 1e-6)
            expected += [own + sum(normalised)] * count
        assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_single_episode_and_equal_turns_have_no_advantage() -> None:
    algorithm = make_algorithm(settings_of())
    alone = ScoredEpisode(reward=1.5, turns=[2, 1], turn_rewards=[1.0, 0.5])
    equal_turns = ScoredEpisode(reward=1.0, turns=[1, 1], turn_rewards=[0.5, 0.5])
    assert algorithm.advantages([[alone], [equal_turns, equal_turns]]) == [[[0, 0, 0]], [[0, 0], [0, 0]]]


# Losses


def weights_of(batch: TokenBatch, cap: float | None, loss: str) -> torch.Tensor:
    """Token-level truncated importance weights where the mode is decoupled and the loss takes them."""
    if cap is None or loss == "dppo_tv":
        return torch.ones_like(batch.behaviour)
    settings = CorrectionSettings(weights="token", cap=cap)
    return CORRECTION_WEIGHTS["token"](batch.old - batch.behaviour, batch.sequences, settings)


def slow_loss(name: str, given_tokens: list[Token], cap: float | None) -> list[float]:
    """The loss of each token, one at a time, as the papers write it."""
    found: list[float] = []
    for new, behaviour, advantage, sequence in given_tokens:
        old = behaviour if cap is None else new
        weight = 1.0 if cap is None else min(math.exp(new - behaviour), cap)
        ratio = math.exp(new - old)
        if name == "gspo":
            log_ratios = [n - (b if cap is None else n) for n, b, _, s in given_tokens if s == sequence]
            ratio = math.exp(sum(log_ratios) / len(log_ratios))
        low, high = 1 - BOUNDS.low, 1 + BOUNDS.high
        inside = min(max(ratio, low), high)
        if name in ("ppo_clip", "gspo"):
            found.append(-weight * min(ratio * advantage, inside * advantage))
        elif name == "cispo":
            found.append(-weight * inside * advantage * new)
        elif name == "sapo":
            gate = 1.0 if advantage > 0 else 1.05
            found.append(-weight * 4 / gate / (1 + math.exp(-gate * (ratio - 1))) * advantage)
        else:
            moved = math.exp(new) - math.exp(behaviour)
            dropped = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
            kept = 0.0 if dropped else -advantage * math.exp(new - behaviour)
            found.append(kept + 1e-3 * (new - behaviour) ** 2)
    return found


@pytest.mark.parametrize("cap", [None, 2.0], ids=["bypass", "decoupled"])
@pytest.mark.parametrize("name", sorted(LOSSES))
@given(given_tokens=tokens)
@settings(max_examples=60, deadline=None)
def test_losses_follow_their_formulas(name: str, cap: float | None, given_tokens: list[Token]) -> None:
    batch = batch_of(given_tokens)
    found = weights_of(batch, cap, name) * LOSSES[name](batch, batch.behaviour if cap is None else batch.old, BOUNDS)
    assert found.tolist() == pytest.approx(slow_loss(name, given_tokens, cap), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("cap", [None, 2.0], ids=["bypass", "decoupled"])
@given(given_tokens=tokens)
@settings(max_examples=60, deadline=None)
def test_the_gradient_of_the_clipped_loss_is_exact(cap: float | None, given_tokens: list[Token]) -> None:
    batch = batch_of(given_tokens)
    old = batch.behaviour if cap is None else batch.old
    (weights_of(batch, cap, "ppo_clip") * ppo_clip(batch, old, BOUNDS)).sum().backward()
    expected: list[float] = []
    for new, behaviour, advantage, _ in given_tokens:
        ratio = math.exp(new - behaviour) if cap is None else 1.0
        weight = 1.0 if cap is None else min(math.exp(new - behaviour), cap)
        stopped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        expected.append(0.0 if stopped else -weight * ratio * advantage)
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    batch = batch_of([(-0.1, -3.0, 1.0, 0), (-3.0, -0.1, -1.0, 1)])
    LOSSES["cispo"](batch, batch.behaviour, BOUNDS).sum().backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.28, 0.8])


def test_gspo_gives_every_token_of_an_episode_its_ratio() -> None:
    batch = batch_of([(-1.0, -1.1, 2.0, 0), (-2.0, -2.1, 2.0, 0), (-1.0, -1.0, 2.0, 1)])
    LOSSES["gspo"](batch, batch.behaviour, BOUNDS).sum().backward()
    ratio = math.exp(0.1)
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx([-2 * ratio, -2 * ratio, -2.0])


def test_gspo_counts_the_episodes_ratio_as_clipped() -> None:
    """The tokens' ratios lie far outside, their mean within; and the other way round."""
    within = batch_of([(-1.0, -2.0, 1.0, 0), (-2.0, -1.0, 1.0, 0)])
    beyond = batch_of([(-1.0, -1.3, 1.0, 0), (-2.0, -2.3, 1.0, 0)])
    algorithm = make_algorithm(settings_of(name="gspo", correction={"mode": "bypass"}))
    assert algorithm.token_metrics(within)["clip_fraction"].tolist() == [0.0, 0.0]
    assert algorithm.token_metrics(beyond)["clip_fraction"].tolist() == [1.0, 1.0]


def test_a_dual_clip_bounds_the_cost_of_a_negative_advantage() -> None:
    batch = batch_of([(-0.1, -5.0, -1.0, 0), (-0.1, -5.0, 1.0, 1)])
    found = ppo_clip(batch, batch.behaviour, replace(BOUNDS, dual=3.0)).tolist()
    assert found == pytest.approx([3.0, -1.28])


# Aggregation and KL


def test_aggregations_are_the_menu_of_verl() -> None:
    """Episodes of 1, 2 and 5 tokens; the same token losses by hand."""
    lengths, losses = [1, 2, 5], [[0.5], [1.0, -2.0], [0.1, 0.2, 0.3, 0.4, 0.5]]
    totals = Totals(tokens=8, sequences=3, groups=1)
    expected = {
        "token_mean": sum(map(sum, losses)) / 8,
        "token_sum": sum(map(sum, losses)),
        "seq_mean_token_sum": sum(map(sum, losses)) / 3,
        "seq_mean_token_sum_norm": sum(map(sum, losses)) / 3 / 16,
        "seq_mean_token_mean": sum(sum(values) / len(values) for values in losses) / 3,
    }
    for name, value in expected.items():
        weights = [AGGREGATIONS[name](length, totals, 16) for length in lengths]
        assert sum(w * sum(values) for w, values in zip(weights, losses, strict=True)) == pytest.approx(value)


@given(x=st.floats(-5, 5))
def test_kl_estimators_follow_their_formulas(x: float) -> None:
    policy, reference = torch.tensor([-6.0], dtype=torch.float64), torch.tensor([-6.0 + x], dtype=torch.float64)
    found = {name: float(estimator(policy, reference)) for name, estimator in KL_ESTIMATORS.items()}
    assert found == pytest.approx({"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}, rel=1e-9, abs=1e-12)


def test_the_kl_term_is_added_to_the_loss() -> None:
    given_tokens, reference = [(-1.0, -1.0, 1.0, 0), (-2.0, -2.0, -1.0, 0)], [-1.5, -2.5]
    penalised = make_algorithm(settings_of(kl={"coefficient": 0.1, "estimator": "k2"}))
    plain = make_algorithm(settings_of())
    assert penalised.needs_reference
    assert not plain.needs_reference
    difference = penalised.loss(batch_of(given_tokens, reference)) - plain.loss(batch_of(given_tokens))
    assert float(difference.detach()) == pytest.approx(0.1 * 0.125)


# Algorithms of a job


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_config_of_a_loss_is_what_it_takes(name: str) -> None:
    config = DECLARED_LOSSES[name].config
    declared = {} if config is None else {field: entry.default for field, entry in config.model_fields.items()}
    arguments = signature(LOSSES[name]).parameters.values()
    assert declared == {each.name: each.default for each in arguments if each.kind is each.KEYWORD_ONLY}


def test_a_job_sets_the_parameters_of_its_loss() -> None:
    moved = math.exp(0.5) - 1
    for temperature in (1.0, 4.0):
        algorithm = make_algorithm(settings_of(loss="sapo", lossConfig={"positive": temperature}))
        loss = algorithm.loss(batch_of([(-1.0, -1.5, 1.0, 0)]))
        assert float(loss.detach()) == pytest.approx(-4 / temperature / (1 + math.exp(-temperature * moved)))


def test_the_spec_names_what_the_learner_implements() -> None:
    assert set(ADVANTAGE_NAMES) == set(ADVANTAGES)
    assert set(DECLARED_LOSSES) == set(LOSSES)
    assert set(AGGREGATION_NAMES) == set(AGGREGATIONS)
    assert set(KL_NAMES) == set(KL_ESTIMATORS)
    assert set(WEIGHT_NAMES) == set(CORRECTION_WEIGHTS)
    assert set(REJECTION_NAMES) == set(REJECTIONS)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_every_preset_conforms(name: str, kl: float) -> None:
    check_algorithm(make_algorithm(settings_of(name=name, kl={"coefficient": kl})))


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
@pytest.mark.parametrize("reject", REJECTION_NAMES)
@pytest.mark.parametrize("weights", WEIGHT_NAMES)
def test_every_correction_conforms(mode: str, weights: str, reject: str) -> None:
    correction = {"mode": mode, "weights": weights, "reject": reject, "rejectBelow": 0.9, "rejectAbove": 1.1}
    check_algorithm(make_algorithm(settings_of(correction=correction)))


def test_kl_in_the_reward_lowers_the_reward_of_its_episode() -> None:
    """R - coefficient * sum over tokens, with log(behaviour / reference) of each token."""
    algorithm = make_algorithm(
        settings_of(advantage="dr_grpo", kl={"coefficient": 0.1, "place": "reward", "estimator": "k1"})
    )
    near = ScoredEpisode(reward=1.0, turns=[2], log_ratios=[0.0, 0.0])
    far = ScoredEpisode(reward=1.0, turns=[2], log_ratios=[1.0, 3.0])
    assert algorithm.needs_reference
    found = algorithm.advantages([[near, far]])[0]
    assert found[0] == pytest.approx([0.2, 0.2])
    assert found[1] == pytest.approx([-0.2, -0.2])
    batch = batch_of([(-1.0, -1.0, 1.0, 0)], reference=[-3.0])
    assert float(algorithm.loss(batch).detach()) == pytest.approx(-1.0), "the loss has no penalty"


def test_presets_are_the_documented_bundles_and_settings_override_them() -> None:
    gspo, dapo = settings_of(name="gspo"), settings_of(name="dapo")
    assert (gspo.loss, gspo.aggregation, gspo.clip_low) == ("gspo", "seq_mean_token_mean", 3e-4)
    assert dapo.dynamic_sampling
    assert settings_of(name="dapo", dynamicSampling=False, clip={"high": 0.3}).clip_high == 0.3
    assert not settings_of(name="dapo", dynamicSampling=False).dynamic_sampling


def test_dynamic_sampling_refuses_groups_of_equal_rewards() -> None:
    assert not make_algorithm(settings_of(name="dapo")).accept([1.0, 1.0])
    assert make_algorithm(settings_of(name="dapo")).accept([1.0, 0.0])
    assert make_algorithm(settings_of(name="grpo")).accept([1.0, 1.0])


class Reinforce:
    """A user's algorithm: REINFORCE with a constant baseline."""

    needs_reference = False
    aggregation = "token_mean"

    def __init__(self, baseline: float = 0.0) -> None:
        self.baseline = baseline

    def advantages(self, batch: Any) -> Any:
        return [
            [
                [0.0 if equal([e.reward for e in group]) else episode.reward - self.baseline] * episode.tokens
                for episode in group
            ]
            for group in batch
        ]

    def loss(self, batch: TokenBatch) -> torch.Tensor:
        return -(batch.weights * batch.advantages * batch.logprobs).sum()

    def accept(self, rewards: Any) -> bool:
        return True


class Decoupled(Reinforce):
    """A user's GDPO (arXiv 2601.05242): each component is normalised within its group, the weighted sums over the
    batch."""

    def advantages(self, batch: Any) -> Any:
        sums = [self._sums(group) for group in batch]
        scale = statistics.pstdev([value for group in sums for value in group]) + 1e-6
        return [
            [[value / scale] * episode.tokens for episode, value in zip(group, values, strict=True)]
            for group, values in zip(batch, sums, strict=True)
        ]

    @staticmethod
    def _sums(group: Any) -> list[float]:
        whole = {"total": RewardComponent(value=0.0, weight=1.0)}
        sums = [0.0] * len(group)
        for name in group[0].components or whole:
            parts = [
                each.components[name] if each.components else RewardComponent(value=each.reward, weight=1.0)
                for each in group
            ]
            values = [part.value for part in parts]
            if equal(values):
                continue
            mean, deviation = statistics.fmean(values), statistics.pstdev(values) + 1e-6
            sums = [
                total + part.weight * (part.value - mean) / deviation for total, part in zip(sums, parts, strict=True)
            ]
        return sums


def scored(components: Sequence[float], weights: Sequence[float]) -> ScoredEpisode:
    parts = {
        f"rule {number}": RewardComponent(value=value, weight=weight)
        for number, (value, weight) in enumerate(zip(components, weights, strict=True))
    }
    return ScoredEpisode(
        reward=math.fsum(part.value * part.weight for part in parts.values()), turns=[2, 1], components=parts
    )


values = st.sampled_from([0.0, 0.1, 0.5, 1.0, 20.0])


@given(
    batch=st.lists(st.lists(st.tuples(values, values), min_size=1, max_size=5), min_size=1, max_size=4),
    weights=st.tuples(st.floats(-2, 2), st.floats(0.1, 2)),
)
@settings(max_examples=80, deadline=None)
def test_a_users_gdpo_is_the_built_in_one(batch: list[list[tuple[float, float]]], weights: tuple[float, float]) -> None:
    episodes = [[scored(components, weights) for components in group] for group in batch]
    own = make_algorithm(settings_of(name=f"{__name__}:Decoupled")).advantages(episodes)
    built_in = make_algorithm(settings_of(name="gdpo")).advantages(episodes)
    for group, expected in zip(built_in, own, strict=True):
        for episode, numbers in zip(group, expected, strict=True):
            assert episode == pytest.approx(numbers, rel=1e-6, abs=1e-9)


def test_gdpo_separates_what_has_the_same_sum() -> None:
    """The total is 1 in either case, so that grpo has nothing to compare; a component of range 0.1 counts as much."""
    group = [scored(components, [1.0, 10.0]) for components in ([1.0, 0.0], [0.0, 0.1], [0.0, 0.0])]
    assert make_algorithm(settings_of(name="grpo")).advantages([group[:2]]) == [[[0.0] * 3] * 2]
    first, second, third = (episode[0] for episode in make_algorithm(settings_of(name="gdpo")).advantages([group])[0])
    assert second > first > third
    level = [scored(components, [1.0, 1.0]) for components in ([1.0, 0.0], [0.0, 0.1], [0.0, 0.0])]
    first, second, third = (episode[0] for episode in make_algorithm(settings_of(name="gdpo")).advantages([level])[0])
    assert first == pytest.approx(second, rel=1e-4)


class Raw(Reinforce):
    """Breaks the suite: equal rewards keep an advantage."""

    def advantages(self, batch: Any) -> Any:
        return [[[episode.reward] * episode.tokens for episode in group] for group in batch]


class PerEpisode(Reinforce):
    """Breaks the suite: one advantage an episode."""

    def advantages(self, batch: Any) -> Any:
        return [[[episode.reward] for episode in group] for group in batch]


class PerMicroBatch(Reinforce):
    """Breaks the suite: a mean over the micro-batch."""

    def loss(self, batch: TokenBatch) -> torch.Tensor:
        return -(batch.advantages * batch.logprobs).mean()


def test_the_suite_names_what_does_not_hold() -> None:
    check_algorithm(Reinforce())
    check_algorithm(Decoupled())
    for made, message in (
        (Raw(), "equal rewards have no advantage"),
        (PerEpisode(), "an advantage for each sampled token"),
        (PerMicroBatch(), "micro-batches do not change the loss"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_algorithm(made)


def test_a_users_class_is_made_from_its_config() -> None:
    path = f"{__name__}:Reinforce"
    made = make_algorithm(settings_of(name=path, config={"baseline": 0.5}))
    batch = [[ScoredEpisode(reward=1.0, turns=[2]), ScoredEpisode(reward=0.0, turns=[1])]]
    assert made.advantages(batch) == [[[0.5, 0.5], [-0.5]]]
    with pytest.raises(UserInputError, match=r"spec\.algorithm\.config.*unexpected"):
        make_algorithm(settings_of(name=path, config={"unexpected": 1}))


class Broken(Reinforce):
    """Raises in the method that its config names."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def advantages(self, batch: Any) -> Any:
        if self.method == "advantages":
            raise ZeroDivisionError("division by zero")
        return [[[math.nan] * episode.tokens for episode in group] for group in batch]

    def loss(self, batch: TokenBatch) -> torch.Tensor:
        raise RuntimeError("shapes differ")

    def accept(self, rewards: Any) -> bool:
        raise KeyError("threshold")


def test_what_a_users_algorithm_raises_is_a_failure_of_user_code() -> None:
    made = make_algorithm(settings_of(name=f"{__name__}:Broken", config={"method": "advantages"}))
    for method, call in (
        ("advantages", lambda: made.advantages([[ScoredEpisode(reward=1.0, turns=[1])]])),
        ("loss", lambda: made.loss(batch_of([(-1.0, -1.0, 1.0, 0)]))),
        ("accept", lambda: made.accept([1.0])),
    ):
        with pytest.raises(UserCodeError, match=rf"Broken\.{method} raised") as caught:
            call()
        assert (caught.value.boundary, caught.value.code) == ("user_code", "algorithm_raised")


@pytest.mark.parametrize(("name", "message"), [("PerEpisode", "one number for each"), ("Broken", "not finite")])
def test_invalid_advantages_are_a_failure_of_user_code(name: str, message: str) -> None:
    config = {"method": ""} if name == "Broken" else {}
    made = make_algorithm(settings_of(name=f"{__name__}:{name}", config=config))
    with pytest.raises(UserCodeError, match=message):
        made.advantages([[ScoredEpisode(reward=1.0, turns=[2]), ScoredEpisode(reward=0.0, turns=[1])]])


def test_an_unknown_name_is_refused_with_the_presets() -> None:
    with pytest.raises(ValueError, match="neither a preset"):
        settings_of(name="ppo")
