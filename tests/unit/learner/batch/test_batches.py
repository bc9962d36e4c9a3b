"""Cutting a batch into micro-batches, the order of scenarios and admission."""

from __future__ import annotations

from array import array
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrl.algorithms import RewardComponent
from kestrl.api.common.v1.common_pb2 import Episode, Row, Turn
from kestrl_learner.batch.rows import PASS_COST, TrainRow, bins, cut, scored_episode, shared_prompt
from kestrl_learner.ledger.schedule import admissible, affordable, epoch_order, group_seed, total_steps


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


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 900), max_size=12), limit=st.integers(1, 2000))
def test_packed_passes_hold_every_item_once_and_keep_to_the_limit(sizes: list[int], limit: int) -> None:
    passes = bins(sizes, limit=limit)
    assert sorted(index for some in passes for index in some) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in some) for some in passes]
    assert all(load <= limit or len(some) == 1 for load, some in zip(loads, passes, strict=True))
    for one, other in pairwise(sorted(loads)):
        assert one + other > limit  # two that fit into one pass are in one


def test_packed_passes_are_of_similar_size() -> None:
    assert bins([230, 230, 230, 230, 100, 100, 100, 100], limit=1024) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert bins([], limit=10) == []


def test_an_item_above_the_limit_lets_no_other_pass_exceed_it() -> None:
    assert bins([169, 40, 50, 40, 50, 20], limit=100) == [[0], [2, 4], [1, 3, 5]]


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
        "advantages",
        "sequence",
        "on_policy",
        "policies",
        "engines",
    }


@given(
    episodes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 4)), max_size=7).map(sorted),
    limit=st.integers(1, 3000),
)
@settings(max_examples=100)
def test_the_rows_of_an_episode_stay_in_one_part(episodes: list[tuple[int, int]], limit: int) -> None:
    lengths, rows = [length for length, _ in episodes], [count for _, count in episodes]
    parts = cut(lengths, prompt=10, limit=limit, rows=rows)
    assert [length for part in parts for length in lengths[part]] == lengths
    for part in parts:
        held = lengths[part]
        assert len(held) == 1 or 10 + sum(rows[part]) * max(held) <= limit


@given(
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 4),
    chances=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=40, max_size=40),
)
@settings(max_examples=150)
def test_a_step_that_waits_makes_no_group_too_old(
    staleness: int, per_step: int, chances: list[tuple[int, bool]]
) -> None:
    """Groups end in any order; a step takes the oldest policy's first, once `affordable` says so."""
    ready: list[int] = []
    running: list[int] = []
    consumed = 0
    for step, (delay, first) in enumerate(chances):
        may = admissible(
            version=step,
            max_staleness=staleness,
            groups_per_step=per_step,
            consumed=consumed,
            outstanding=len(ready) + len(running),
        )
        running += [step] * may
        # Groups end one by one, any of them first, until the step may take its groups.
        while len(ready) < per_step or not affordable(
            step=step, max_staleness=staleness, groups_per_step=per_step, ready=ready, running=running
        ):
            assert running, "waiting for groups that run is enough"
            ready.append(running.pop(0 if first else max(0, len(running) - 1 - delay)))
        ready.sort()
        taken, ready = ready[:per_step], ready[per_step:]
        consumed += per_step
        assert all(step - version <= staleness for version in taken)


def test_an_algorithm_sees_the_components_of_the_reward_with_their_weights() -> None:
    episode = Episode(
        id="group/0",
        reward=1.5,
        rewards={"format": 1.0, "answer": 0.25},
        reward_weights={"format": 1.0, "answer": 2.0},
        rows=[Row(mask=bytes([0, 1, 1]))],
        turns=[Turn(row=0, start=1, end=3)],
    )
    scored = scored_episode(episode)
    assert scored.components == {
        "format": RewardComponent(value=1.0, weight=1.0),
        "answer": RewardComponent(value=0.25, weight=2.0),
    }
    assert (scored.reward, scored.turns) == (1.5, [2])
    episode.reward_weights.clear()
    assert scored_episode(episode).components == {}, "an episode of an earlier release"
