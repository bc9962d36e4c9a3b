"""Rows packed into one sequence: the log-probs and gradients of separate rows, and models that cannot have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.learner.fakes import VOCABULARY, model_with_a_window, wide_model
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kestrl_learner.batch import packing
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.sft.encoding import train_row
from kestrl_learner.sft.training import as_group

Maker = Callable[..., PolicyModel]


def group_of(lengths: Sequence[int], learned: int = 2) -> TrainGroup:
    """Rows of these lengths, of which every `learned`th token and the last is learned, and the first never."""
    rows = [
        [(number * 11 + place * 7) % (VOCABULARY - 1) + 1 for place in range(length)]
        for number, length in enumerate(lengths)
    ]
    masks = [
        [int(place > 0 and (place % learned == 0 or place == len(row) - 1)) for place in range(len(row))]
        for row in rows
    ]
    return as_group([[train_row(row, mask, 0)] for row, mask in zip(rows, masks, strict=True)])


def logprobs_by_row(policy: PolicyModel, group: TrainGroup) -> list[Tensor]:
    """Log-probs of the learned tokens of each row, in the order of the group's rows."""
    found: dict[int, Tensor] = {}
    for rows, logprobs in policy.logprobs(group, 1.0):
        parts = logprobs.split([sum(row.mask) for row in rows])
        found |= {id(row): part for row, part in zip(rows, parts, strict=True)}
    return [found[id(row)] for row in group.rows]


def reference(policy: PolicyModel, group: TrainGroup) -> list[Tensor]:
    """As `logprobs_by_row`, by the model's own logits of each row alone."""
    found: list[Tensor] = []
    for row in group.rows:
        ids = torch.tensor([list(row.token_ids)])
        scores = policy.peft(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(scores[torch.tensor(list(row.mask[1:]), dtype=torch.bool)])
    return found


def gradient(policy: PolicyModel, loss: Tensor) -> Tensor:
    policy.peft.zero_grad(set_to_none=True)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def policy(request: pytest.FixtureRequest, models: dict[str, Path]) -> PolicyModel:
    from tests.unit.learner.fakes import make_policy

    return make_policy(models[request.param], disturb=0.3, dtype="float64")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6), limit=st.integers(10, 200))
def test_packed_rows_have_log_probs_and_gradients_of_separate_rows(
    policy: PolicyModel, lengths: list[int], limit: int
) -> None:
    group = group_of(lengths)
    policy.tokens_per_pass = limit
    found, expected = logprobs_by_row(policy, group), reference(policy, group)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    ours = gradient(policy, (torch.cat(found) ** 2).mean())
    theirs = gradient(policy, (torch.cat(expected) ** 2).mean())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_pass_computes_no_padding_and_nothing_behind_the_last_learned_token(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[int]] = []
    original = packing.packed_hidden

    def counted(body: Any, packed: Sequence[packing.PackedRows], device: torch.device, **options: Any) -> Tensor:
        computed.extend([len(row) for row in rows] for _, rows in packed)
        return original(body, packed, device, **options)

    monkeypatch.setattr(packing, "packed_hidden", counted)
    policy.tokens_per_pass = 1000
    rows = [[train_row([1] * length, [0] * (length - 3) + [1, 0, 0], 0)] for length in (5, 30)]
    logprobs_by_row(policy, as_group(rows))
    assert computed == [[2, 27]]


def test_packed_rows_agree_in_float32_too(models: dict[str, Path], policy_of: Maker) -> None:
    policy, group = policy_of(models["llama"], disturb=0.3), group_of([2, 40, 17, 3])
    for one, other in zip(logprobs_by_row(policy, group), reference(policy, group), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_bfloat16_base_packs_rows(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"], dtype="bfloat16", gradient_checkpointing=True)
    assert policy.peft.config._attn_implementation == packing.NAME


def test_a_model_with_an_attention_window_pads_its_rows(tmp_path: Path, policy_of: Maker) -> None:
    policy, group = policy_of(model_with_a_window(tmp_path), disturb=0.3), group_of([20, 7, 12])
    assert policy.peft.config._attn_implementation == "sdpa"
    for one, other in zip(logprobs_by_row(policy, group), reference(policy, group), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def refusing(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise ValueError("a mask of this form is unknown")


def forgetful(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any) -> Any:
    """Causal attention over the whole sequence, as if it were one row."""
    return sdpa_attention_forward(module, query, key, value, None, **options)


@pytest.mark.parametrize("other", [refusing, forgetful])
def test_a_family_whose_packed_rows_see_each_other_pads_them(
    other: Callable[..., Any], models: dict[str, Path], policy_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor | None] = []

    def as_a_family(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        calls.append(mask)
        if hasattr(mask, packing.LAYOUT):
            return other(module, query, key, value, mask, **options)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, packing.NAME, as_a_family)
    policy, group = policy_of(models["llama"], disturb=0.3), group_of([9, 4])
    assert calls
    assert policy.peft.config._attn_implementation == "sdpa"
    for one, expected in zip(logprobs_by_row(policy, group), reference(policy, group), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("heads", [8, 16])
def test_packed_rows_have_log_probs_of_separate_rows_on_a_gpu(
    heads: int, checkpointing: bool, tmp_path: Path, policy_of: Maker
) -> None:
    """Also with heads that are too narrow for FlexAttention."""
    folder = wide_model(tmp_path, head_dim=heads)
    here = policy_of(folder, disturb=0.3)
    there = policy_of(folder, device="cuda", gradient_checkpointing=checkpointing)
    there.load_trained_state(here.trained_state())
    group = group_of([30, 4, 17])
    for one, other in zip(logprobs_by_row(there, group), reference(here, group), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-5)
