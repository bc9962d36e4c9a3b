"""Advantages and losses against slow transcriptions of their formulas, loop by loop, in float64."""

from __future__ import annotations

import math
import statistics
from array import array
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrl_learner.algo.advantages import ADVANTAGES, dr_grpo, grpo, rloo
from kestrl_learner.algo.losses import Clip, ppo_clip
from kestrl_learner.batch import PASS_COST, TrainRow, cut, shared_prompt
from kestrl_learner.schedule import admissible, epoch_order, group_seed, total_steps

CLIP = Clip(low=0.2, high=0.28)
rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)
tokens = st.lists(st.tuples(st.floats(-8, -0.01), st.floats(-8, -0.01), st.floats(-3, 3)), min_size=1, max_size=12)


def slow_advantages(name: str, given_rewards: list[float]) -> list[float]:
    count = len(given_rewards)
    mean = sum(given_rewards) / count
    if name == "grpo":
        deviation = statistics.pstdev(given_rewards)
        return [(reward - mean) / (deviation + 1e-6) for reward in given_rewards]
    if name == "dr_grpo":
        return [reward - mean for reward in given_rewards]
    return [
        reward - sum(other for place, other in enumerate(given_rewards) if place != index) / (count - 1)
        for index, reward in enumerate(given_rewards)
    ]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(given_rewards=rewards)
@settings(max_examples=60)
def test_advantages_are_what_their_formulas_say(name: str, given_rewards: list[float]) -> None:
    if max(given_rewards) - min(given_rewards) <= 1e-6:
        return
    assert ADVANTAGES[name](given_rewards) == pytest.approx(slow_advantages(name, given_rewards), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize(
    "given_rewards",
    [[], [0.7], [0.1 + 0.2, 0.3], [1.0] * 5],
    ids=["no episode", "one", "equal but for rounding", "equal"],
)
def test_where_there_is_nothing_to_compare_there_is_no_advantage(name: str, given_rewards: list[float]) -> None:
    assert ADVANTAGES[name](given_rewards) == [0.0] * len(given_rewards)


def test_advantages_of_a_group_one_knows_by_heart() -> None:
    assert grpo([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert dr_grpo([0.0, 1.0]) == [-0.5, 0.5]
    assert rloo([0.0, 1.0]) == [-1.0, 1.0]


def slow_loss(rows: list[tuple[float, float, float]], cap: float | None) -> float:
    """-sum w min(r A, clip(r) A), one token at a time."""
    total = 0.0
    for new, behaviour, advantage in rows:
        drift = min(20.0, max(-20.0, new - behaviour))
        weight = 1.0 if cap is None else min(math.exp(drift), cap)
        r = math.exp(drift) if cap is None else 1.0
        bounded = min(max(r, 1 - CLIP.low), 1 + CLIP.high)
        total -= weight * min(r * advantage, bounded * advantage)
    return total


def slow_gradient(rows: list[tuple[float, float, float]], cap: float | None) -> list[float]:
    """d loss / d new of each token, by hand: r' = r, and a weight has none."""
    gradient: list[float] = []
    for new, behaviour, advantage in rows:
        r = math.exp(new - behaviour) if cap is None else 1.0
        weight = 1.0 if cap is None else min(math.exp(new - behaviour), cap)
        stopped = (advantage > 0 and r > 1 + CLIP.high) or (advantage < 0 and r < 1 - CLIP.low)
        gradient.append(0.0 if stopped else -weight * r * advantage)
    return gradient


@pytest.mark.parametrize("cap", [None, 2.0], ids=["bypass", "decoupled"])
@given(rows=tokens)
@settings(max_examples=80)
def test_the_loss_and_its_gradient_are_what_the_formula_says(
    cap: float | None, rows: list[tuple[float, float, float]]
) -> None:
    new, behaviour, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    loss = ppo_clip(new, behaviour, advantages, clip=CLIP, importance_cap=cap)
    assert float(loss.detach()) == pytest.approx(slow_loss(rows, cap), rel=1e-9, abs=1e-12)
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(slow_gradient(rows, cap), rel=1e-9, abs=1e-12)


def test_the_gradient_agrees_with_finite_differences() -> None:
    new = torch.tensor([-1.0, -2.0, -0.5, -1.2], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.1, -1.0, -0.9, -1.25], dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return ppo_clip(values, behaviour, advantages, clip=CLIP, importance_cap=None)

    assert torch.autograd.gradcheck(loss, (new,))


def row(ids: list[int], mask: list[int]) -> tuple[array[int], bytes]:
    return array("i", ids), bytes(mask)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        ([row([1, 2, 3, 4], [0, 0, 1, 1]), row([1, 2, 5, 6], [0, 0, 1, 1])], 2),
        ([row([1, 2, 3, 4], [0, 0, 0, 1]), row([1, 9, 3, 4], [0, 0, 0, 1])], 1),
        ([row([1, 2, 3], [0, 0, 1]), row([1, 2, 3], [0, 1, 1])], 1),
        ([row([9, 2], [0, 1]), row([1, 2], [0, 1])], 0),
        ([row([1, 2, 3], [0, 0, 0]), row([1, 2, 3], [0, 0, 1])], 2),
        ([], 0),
    ],
    ids=[
        "up to the first sampled token",
        "only as far as all agree",
        "up to the first sampled token of any",
        "nothing in common",
        "a row without sampled tokens keeps one",
        "no rows",
    ],
)
def test_the_shared_prompt(rows: list[Any], length: int) -> None:
    assert shared_prompt(rows) == length


def cost(lengths: list[int], parts: list[slice], prompt: int) -> int:
    return sum(PASS_COST + prompt + len(lengths[part]) * max(lengths[part]) for part in parts)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 900), max_size=9).map(sorted),
    prompt=st.integers(0, 300),
    limit=st.integers(1, 3000),
)
def test_rows_are_cut_into_the_cheapest_parts(lengths: list[int], prompt: int, limit: int) -> None:
    parts = cut(lengths, prompt=prompt, limit=limit)
    assert [length for part in parts for length in lengths[part]] == lengths
    for part in parts:
        held = lengths[part]
        assert len(held) == 1 or prompt + len(held) * max(held) <= limit
    for borders in product([False, True], repeat=max(0, len(lengths) - 1)):
        begins = [0, *(index + 1 for index, border in enumerate(borders) if border)] if lengths else []
        other = [slice(begin, end) for begin, end in pairwise([*begins, len(lengths)])]
        allowed = all(len(lengths[p]) == 1 or prompt + len(lengths[p]) * max(lengths[p]) <= limit for p in other)
        assert not allowed or cost(lengths, parts, prompt) <= cost(lengths, other, prompt)


def test_a_straggler_does_not_pad_the_others() -> None:
    assert cut([160] * 7 + [800], prompt=80, limit=10_000) == [slice(0, 7), slice(7, 8)]


def test_steps_in_all_are_whole_batches_of_all_epochs() -> None:
    assert total_steps(10, 3, 4, None) == 7
    assert total_steps(10, 3, 4, 5) == 5
    assert total_steps(3, 1, 4, None) == 0


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 50), size=st.integers(1, 60))
@settings(max_examples=40)
def test_an_epoch_is_an_order_of_every_scenario_and_the_same_each_time(seed: int, epoch: int, size: int) -> None:
    order = epoch_order(seed, epoch, size)
    assert sorted(order) == list(range(size))
    assert order == epoch_order(seed, epoch, size)
    assert 0 <= group_seed(seed, epoch, order[0]) < 2**31


@pytest.mark.parametrize(
    ("staleness", "version", "consumed", "outstanding", "may"),
    [
        (0, 0, 0, 0, 4),
        (0, 0, 4, 0, 0),
        (0, 1, 4, 1, 3),
        (1, 0, 0, 0, 8),
        (1, 0, 4, 4, 0),
        (1, 1, 4, 4, 4),
        (0, 0, 4, 4, 0),
    ],
    ids=[
        "synchronous: one step's groups",
        "synchronous: none while a step trains",
        "synchronous: the rest of a step",
        "asynchronous: two steps' groups",
        "asynchronous: one ahead while a step trains",
        "asynchronous: the next when it is published",
        "never below nothing",
    ],
)
def test_admission(staleness: int, version: int, consumed: int, outstanding: int, may: int) -> None:
    found = admissible(
        version=version, max_staleness=staleness, groups_per_step=4, consumed=consumed, outstanding=outstanding
    )
    assert found == may


def test_a_row_knows_nothing_of_algorithms() -> None:
    assert set(TrainRow.__dataclass_fields__) == {
        "token_ids",
        "mask",
        "behaviour",
        "advantage",
        "fresh",
        "policy",
        "engines",
    }


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=8))
def test_every_reward_that_is_accepted_has_a_finite_advantage(rewards: list[float]) -> None:
    for estimator in ADVANTAGES.values():
        assert all(math.isfinite(value) for value in estimator(rewards))


def test_rewards_whose_squares_overflow_are_standardised() -> None:
    assert grpo([1e200, -1e200]) == pytest.approx([1.0, -1.0])
