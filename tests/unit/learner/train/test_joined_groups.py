"""Several groups in one forward pass: log-probs, loss and gradient of each by itself, for every algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.learner.fakes import make_policy, model_with_a_window
from tests.unit.learner.model.test_shared_prompts import group_of, plain_rows
from tests.unit.learner.train.test_training import algorithm, make_groups
from torch import Tensor

from kestrl._shared.plan.algorithm import AlgorithmSettings, CorrectionSettings
from kestrl_learner.batch import packing
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train import trainer as module
from kestrl_learner.train.trainer import StepResult, Trainer

Maker = Callable[..., PolicyModel]


CHECKPOINTING: dict[str, dict[str, Any]] = {
    "all layers": {"gradient_checkpointing": True},
    "the first layer": {"gradient_checkpointing": True, "checkpointed_layers": 1},
    "none": {},
}


@pytest.fixture(scope="module", params=CHECKPOINTING)
def policy(request: pytest.FixtureRequest, models: dict[str, Path]) -> PolicyModel:
    return make_policy(models["qwen3"], disturb=0.3, dtype="float64", **CHECKPOINTING[request.param])


def of_any_prompt(prompt: int, rows: Sequence[tuple[int, Sequence[bool]]]) -> TrainGroup:
    """A group; without a prompt nothing predicts the first token of a row."""
    return group_of(prompt, rows if prompt else [(number, [False, *mask]) for number, mask in rows])


ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=1, max_size=12)), min_size=1, max_size=4)
GROUPS = st.lists(st.builds(of_any_prompt, st.integers(0, 20), ROWS), min_size=1, max_size=3)


def by_row(policy: PolicyModel, groups: Sequence[TrainGroup]) -> dict[tuple[int, int], Tensor]:
    """Log-probs of the sampled tokens of each row, by the numbers of the group and the row."""
    places = {id(row): (number, place) for number, group in enumerate(groups) for place, row in enumerate(group.rows)}
    found: dict[tuple[int, int], Tensor] = {}
    for pieces in policy.passes([*enumerate(groups)]):
        rows = [row for piece in pieces for row in piece.rows]
        parts = policy.pass_logprobs(pieces, 1.0, None).split([sum(row.mask) for row in rows])
        found |= {places[id(row)]: part for row, part in zip(rows, parts, strict=True)}
    return found


def slopes(policy: PolicyModel, loss: Tensor) -> Tensor:
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, policy.parameters())])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=GROUPS, limit=st.sampled_from([1, 30, 400]))
def test_groups_in_one_pass_have_log_probs_and_gradients_of_plain_rows(
    policy: PolicyModel, groups: list[TrainGroup], limit: int
) -> None:
    policy.tokens_per_pass = limit
    found = by_row(policy, groups)
    expected = [part for group in groups for part in plain_rows(policy, group)]
    ours = [found[number, place] for number, group in enumerate(groups) for place in range(len(group.rows))]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    if sum(group.sampled for group in groups):
        one, other = (slopes(policy, (torch.cat(some) ** 2).mean()) for some in (ours, expected))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * max(1.0, float(other.abs().max())))


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": "seq_mean_token_sum"},
    "dppo": {"loss": "dppo_tv", "aggregation": "seq_mean_token_sum_norm"},
    "kl": {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    "truncated": {"correction": CorrectionSettings(decoupled=True, weights="sequence", reject="k3", reject_kl=9.0)},
}


def batch() -> list[TrainGroup]:
    """Groups of two sizes, one of which has no gradient, and one whose episodes have several rows."""
    groups = [*make_groups(count=3), *make_groups(count=1, seed=5, advantage=0.0), *make_groups(count=2, seed=9)]
    several = [(0, [1, 1, 0, 1]), (0, [0, 1]), (1, [0, 0]), (2, [1] * 5), (2, [0, 0, 1])]
    return [*groups, group_of(9, several)]


def step(folder: Path, given_settings: AlgorithmSettings, *, limit: int, **options: Any) -> tuple[StepResult, int]:
    """The result of a step, and the number of passes over its batch."""
    policy = make_policy(folder, disturb=0.3, tokens_per_pass=limit, **options)
    trainer = Trainer(policy, given_settings, 0.7)
    return trainer.step(batch(), 0), len(policy.passes([*enumerate(batch())]))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("several", [False, True])
def test_a_step_is_the_same_whatever_groups_a_pass_holds(name: str, several: bool, models: dict[str, Path]) -> None:
    changes = ALGORITHMS[name] | ({"mini_batches": 2, "mini_batch_epochs": 2} if several else {})
    given_settings = algorithm(max_grad_norm=1e9, **changes)
    result, passes = step(models["qwen3"], given_settings, limit=1000)
    expected, alone = step(models["qwen3"], given_settings, limit=1, gradient_checkpointing=True)
    assert (passes, alone) == (1, sum(len({row.sequence for row in group.rows}) for group in batch()))
    assert result.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.mismatch.all.mean == pytest.approx(expected.mismatch.all.mean, rel=1e-5)
    assert result.zero_advantage_groups == expected.zero_advantage_groups == 1
    for metric, value in result.diagnostics.items():
        if metric != "computed_tokens_share":
            assert value == pytest.approx(expected.diagnostics[metric], rel=1e-4, abs=1e-6), metric


def gradient_of_step(folder: Path, given_settings: AlgorithmSettings, **options: Any) -> Tensor:
    policy = make_policy(folder, disturb=0.3, **options)
    trainer = Trainer(policy, given_settings, 0.7)
    kept: list[Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: kept.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))  # type: ignore[union-attr]
    )
    trainer.step(batch(), 0)
    (gradient,) = kept
    return gradient


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_joined_groups_is_that_of_each_by_itself(name: str, models: dict[str, Path]) -> None:
    given_settings = algorithm(max_grad_norm=1e9, **ALGORITHMS[name])
    together = gradient_of_step(models["llama"], given_settings)
    apart = gradient_of_step(models["llama"], given_settings, tokens_per_pass=1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


def test_the_tokens_of_a_pass_name_their_group_and_episode(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = module.token_batch

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(original(*args, **options))
        return seen[-1]

    monkeypatch.setattr(module, "token_batch", recorded)
    step(models["llama"], algorithm(), limit=1000)
    (one,) = seen
    groups = [group for group in batch() if not group.zero_advantage]
    assert torch.bincount(one.groups).tolist() == [group.sampled for group in groups]
    per_episode = [
        sum(sum(row.mask) for row in group.rows if row.sequence == sequence)
        for group in groups
        for sequence in sorted({row.sequence for row in group.rows})
    ]
    assert torch.bincount(one.sequences).tolist() == [count for count in per_episode if count]


def test_a_step_of_many_passes_reads_no_more_numbers_than_one_of_one_pass(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits for the device."""
    reads: list[str] = []
    for name in ("item", "cpu", "tolist", "__float__", "__bool__", "__int__"):
        original = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            reads.append(name)
            return original(tensor, *args, **options)

        monkeypatch.setattr(Tensor, name, counted)
    counts: list[list[str]] = []
    for limit in (1000, 1):
        policy = make_policy(models["qwen3"], tokens_per_pass=limit)
        trainer = Trainer(policy, algorithm(loss="gspo"), 1.0)
        reads.clear()
        trainer.step(batch(), 0)
        counts.append(sorted(reads))
    assert counts[0] == counts[1]


def test_a_family_without_packing_computes_groups_by_themselves(policy_of: Maker, tmp_path: Path) -> None:
    policy = policy_of(model_with_a_window(tmp_path))
    assert policy.peft.config._attn_implementation != packing.NAME
    groups = make_groups(count=3)
    assert [[piece.index for piece in pieces] for pieces in policy.passes([*enumerate(groups)])] == [[0], [1], [2]]
