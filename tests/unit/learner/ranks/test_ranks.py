"""A step on several ranks is the step of one: updates and what is reported, at any number of ranks and across a resume
with another number.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.learner.fakes import make_policy
from tests.unit.learner.ranks.forked_ranks import on_ranks
from tests.unit.learner.train.test_training import algorithm, make_groups
from torch.distributed.tensor import DTensor

from kestrl._shared.plan.sft import LOSS
from kestrl.algorithms import ScoredEpisode
from kestrl_learner.batch import packing
from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.ranks.group import OneRank, RankGroup, RankLost, Ranks, lost_ranks
from kestrl_learner.train.passes import Pass, PassKind, deal, schedule
from kestrl_learner.train.trainer import NotFinite, StepResult, Trainer

pytestmark = pytest.mark.timeout(300)
Weights = dict[str, Any]
UPDATE = 1e-5
"""Largest accepted difference of an updated weight; an update of the tests is about 1e-2."""


# Dealing


@given(costs=st.lists(st.integers(1, 50), max_size=20), count=st.integers(1, 5))
def test_passes_are_dealt_once_and_evenly(costs: list[int], count: int) -> None:
    shares = deal(costs, count)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    most = max(sum(costs[index] for index in share) for share in shares)
    lower_bound = max(max(costs, default=0), -(-sum(costs) // count))
    assert most <= lower_bound * 4 / 3 + max(costs, default=0)


class Numbered:
    """A rank by its number only."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError


@given(kinds=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), count=st.integers(2, 4))
def test_every_rank_runs_the_same_kinds_of_passes(kinds: list[tuple[bool, bool]], count: int) -> None:
    (group,) = make_groups(count=1)
    passes = [
        Pass(pieces=[Piece(index, group, group.rows[:1])], kind=PassKind(*kind), tokens=9)
        for index, kind in enumerate(kinds)
    ]
    schedules = [list(schedule(passes, Numbered(rank, count))) for rank in range(count)]
    assert len({tuple(kind for kind, _ in one) for one in schedules}) == 1
    indices = sorted(piece.index for one in schedules for _, each in one if each for piece in each.pieces)
    assert indices == list(range(len(kinds)))
    assert all(each is None or each.kind == kind for one in schedules for kind, each in one)
    assert [each for _, each in schedule(passes, OneRank())] == passes


# Steps


def trainer_on(ranks: Ranks, folder: Path, settings: dict[str, Any], options: dict[str, Any]) -> Trainer:
    group = ranks if isinstance(ranks, RankGroup) else None
    if group is not None:
        options = options | {"device": str(group.device)}
    policy = make_policy(folder, group=group, **options)
    return Trainer(policy, algorithm(**settings), 0.9, ranks=ranks)


def weights_of(trainer: Trainer) -> Weights:
    return {name: weight.numpy().copy() for name, weight in trainer.model.trained_state().items()}


def steps_on(
    ranks: Ranks,
    folder: Path,
    batches: list[list[TrainGroup]],
    settings: dict[str, Any],
    options: dict[str, Any],
    state: bytes | None = None,
    first: int = 0,
) -> tuple[Weights, list[dict[str, Any]], bytes]:
    """Weights, results and state after a step on each batch."""
    trainer = trainer_on(ranks, folder, settings, options)
    if state is not None:
        trainer.restore(state)
    if isinstance(ranks, RankGroup):
        sharded = [weight for weight in trainer.model.network.parameters() if isinstance(weight, DTensor)]
        assert len(sharded) > 10, "the layers' weights are sharded"
        assert sum(weight.to_local().numel() for weight in sharded) < sum(weight.numel() for weight in sharded)
        assert trainer.model.network.config._attn_implementation == packing.NAME, "ranks pack rows, too"
    trainer.published("policy")
    results = [facts(trainer.step(batch, first + number)) for number, batch in enumerate(batches)]
    return weights_of(trainer), results, trainer.state()


def facts(result: StepResult) -> dict[str, Any]:
    return {**asdict(result), "mismatch": result.mismatch.facts()}


def numbers(facts: Any, name: str = "") -> dict[str, float]:
    """The numbers of nested facts, by path."""
    if isinstance(facts, dict):
        return {key: value for part in facts for key, value in numbers(facts[part], f"{name}/{part}").items()}
    if isinstance(facts, array | list):
        return numbers(dict(enumerate(facts)), name)
    return {name: float(facts)}


def assert_equal(found: Sequence[Any], one: Any) -> None:
    for weights, results, _ in found:
        for name, weight in one[0].items():
            assert abs(weights[name] - weight).max() <= UPDATE, name
        for ours, theirs in zip(results, one[1], strict=True):
            assert numbers(ours) == pytest.approx(numbers(theirs), rel=2e-4, abs=2e-5)
    first = found[0][0]
    assert all((weights[name] == first[name]).all() for weights, *_ in found for name in first), "ranks stay equal"


def scored(groups: list[TrainGroup]) -> list[TrainGroup]:
    return [
        replace(
            group,
            episodes=[ScoredEpisode(reward=float(row.sequence), turns=[sum(row.mask)]) for row in group.rows],
        )
        for group in groups
    ]


def short(group: TrainGroup) -> TrainGroup:
    """Rows of one token each."""
    rows = [
        replace(
            row,
            token_ids=row.token_ids[:1],
            mask=row.mask[:1],
            behaviour=row.behaviour[:1],
            advantages=row.advantages[:1],
            on_policy=row.on_policy[:1],
            policies=row.policies[:1],
            engines=row.engines[:1],
        )
        for row in group.rows
    ]
    return replace(group, rows=rows)


def without_prompt(group: TrainGroup) -> TrainGroup:
    rows = [
        replace(
            row,
            token_ids=array("i", [3]) + row.token_ids,
            mask=b"\0" + row.mask,
            behaviour=array("f", [0.0]) + row.behaviour,
            advantages=array("d", [0.0]) + row.advantages,
        )
        for row in group.rows
    ]
    return replace(group, prompt=array("i"), rows=rows)


def mixed() -> list[TrainGroup]:
    """Groups of every kind: with and without a prompt, a gradient, more than one token."""
    first, second, third = make_groups(count=3, seed=3)
    return [first, short(second), without_prompt(third), *make_groups(count=2, advantage=0.0, seed=5)]


CASES: dict[str, tuple[list[list[TrainGroup]], dict[str, Any], dict[str, Any]]] = {
    "every kind of pass": ([mixed(), mixed()[:3]], {}, {}),
    "fewer groups than ranks": ([make_groups(count=1), make_groups(count=1, advantage=0.0)], {}, {}),
    "small passes": ([make_groups()], {}, {"tokens_per_pass": 24}),
    "packed rows, gradient checkpointing": (
        [make_groups(count=3), mixed()],
        {},
        {"gradient_checkpointing": True, "tokens_per_pass": 60},
    ),
    "mini-batches, an older policy": (
        [make_groups(count=4), make_groups(count=2, on_policy=False)],
        {"mini_batches": 2, "mini_batch_epochs": 2, "max_staleness": 1},
        {},
    ),
    "fine-tuning": (
        [[without_prompt(group) for group in make_groups(count=3)], [without_prompt(*make_groups(count=1))]],
        {"name": LOSS, "advantage": "", "loss": ""},
        {"tokens_per_pass": 24},
    ),
    "KL in the reward": (
        [scored(make_groups())],
        {"kl_coefficient": 0.5, "kl_estimator": "k1", "kl_place": "reward", "advantage": "dr_grpo"},
        {},
    ),
}


def all_cases(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {name: steps_on(ranks, folder, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    return all_cases(OneRank(), models["qwen3"])


@pytest.fixture(scope="module")
def together(models: dict[str, Path]) -> dict[int, list[Any]]:
    """What every rank has, by number of ranks."""
    found = {count: on_ranks(count, all_cases, models["qwen3"]) for count in (2, 4)}
    for each in (one for ranks in found.values() for one in ranks):
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 4])
def test_several_ranks_take_the_step_of_one(
    count: int, name: str, alone: dict[str, Any], together: dict[int, list[Any]]
) -> None:
    assert len(together[count]) == count
    assert_equal([rank[name] for rank in together[count]], alone[name])


def test_a_run_resumes_with_another_number_of_ranks(models: dict[str, Path]) -> None:
    """A step each on 1, 2, 4 and 1 ranks, with Adam's moments carried over, is four steps on one."""
    batches = [make_groups(count=3, seed=number) for number in range(4)]
    whole = steps_on(OneRank(), models["qwen3"], batches, {}, {})
    state: bytes | None = None
    weights: Weights = {}
    for number, count in enumerate((1, 2, 4, 1)):
        batch = batches[number : number + 1]
        if count == 1:
            weights, _, state = steps_on(OneRank(), models["qwen3"], batch, {}, {}, state, number)
        else:
            weights, _, state = on_ranks(count, steps_on, models["qwen3"], batch, {}, {}, state, number)[0]
    for name, weight in whole[0].items():
        assert abs(weights[name] - weight).max() <= UPDATE, name
    assert max(abs(weight).max() for name, weight in weights.items() if "lora_B" in name) > 100 * UPDATE


def broken_on_rank_1(ranks: RankGroup, folder: Path) -> tuple[str, bool, bool]:
    """The error of a step whose last update is not finite on one rank, whether it was undone, and whether the step
    after it does something."""
    trainer = trainer_on(ranks, folder, {"mini_batches": 2}, {})
    trainer.step(make_groups(count=4), 0)
    before = weights_of(trainer)
    plain, calls = trainer.algorithm.loss, [0]

    def broken(batch: Any) -> torch.Tensor:
        calls[0] += 1
        return plain(batch) * (float("nan") if ranks.rank == 1 and calls[0] == 2 else 1.0)

    trainer.algorithm.loss = broken  # type: ignore[method-assign]
    error = ""
    try:
        trainer.step(make_groups(count=4), 1)
    except NotFinite as raised:
        error = str(raised)
    undone = all((weight == before[name]).all() for name, weight in weights_of(trainer).items())
    trainer.step(make_groups(count=4), 1)
    return error, undone, any((weight != before[name]).any() for name, weight in weights_of(trainer).items())


def test_an_update_not_finite_on_one_rank_is_undone_on_all(models: dict[str, Path]) -> None:
    found = on_ranks(2, broken_on_rank_1, models["qwen3"])
    assert [("learningRate" in error, undone, went_on) for error, undone, went_on in found] == [(True, True, True)] * 2


def differing(ranks: RankGroup, folder: Path) -> None:
    trainer = trainer_on(ranks, folder, {}, {})
    if ranks.rank:
        with torch.no_grad():
            trainer.model.parameters()[0].add_(1e-3)
    trainer.state()


def test_ranks_with_different_adapters_write_no_checkpoint(models: dict[str, Path]) -> None:
    found = on_ranks(2, differing, models["qwen3"])
    assert [getattr(error, "code", error) for error in found] == ["ranks_differ"] * 2


def left_by_rank_1(ranks: RankGroup, folder: Path, how: str) -> None:
    """A step that rank 1 never takes."""
    trainer = trainer_on(ranks, folder, {}, {})
    if ranks.rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.rank:
        ranks.store.wait(["rank 0 gave up"])
        return
    try:
        with lost_ranks("step 0"):
            trainer.step(make_groups(), 0)
    finally:
        ranks.store.set("rank 0 gave up", "")


@pytest.mark.parametrize(("how", "seconds"), [("killed", 60.0), ("silent", 3.0)])
def test_a_rank_that_is_killed_or_silent_is_an_error(how: str, seconds: float, models: dict[str, Path]) -> None:
    found = on_ranks(2, left_by_rank_1, models["qwen3"], how, seconds=seconds)
    assert isinstance(found[0], RankLost)
    assert found[0].retryable
    assert "step 0" in str(found[0])
    assert found[1] is None


@pytest.mark.gpu
def test_two_ranks_on_gpus_take_the_step_of_one(models: dict[str, Path]) -> None:
    """Over NCCL, against one GPU; it needs two."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    batches = [mixed(), mixed()[:3]]
    weights, _, _ = steps_on(OneRank(), models["qwen3"], batches, {}, {"device": "cuda"})
    found = on_ranks(2, steps_on, models["qwen3"], batches, {}, {}, device="cuda")
    for ours, _, _ in found:
        for name, weight in weights.items():
            assert abs(ours[name] - weight).max() <= 10 * UPDATE, name
