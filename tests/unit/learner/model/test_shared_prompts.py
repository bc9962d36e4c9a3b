"""Rows of a group packed behind one copy of their prompt: the log-probs and gradients of plain rows, where it is used,
and models that cannot have it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.learner.batch.test_packing import forgetful, gradient, logprobs_by_row
from tests.unit.learner.fakes import VOCABULARY, make_policy, model_with_a_window, wide_model
from tests.unit.learner.train.test_training import algorithm
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from transformers import AttentionInterface
from transformers.integrations import flex_attention as integration

from kestrl_learner.batch import kernels, packing
from kestrl_learner.batch.layout import BLOCK, Layout, PackedSegment, block_mask
from kestrl_learner.batch.packing import Kernel
from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train.trainer import Trainer

Maker = Callable[..., PolicyModel]
ROWS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=24)), min_size=1, max_size=7)
"""Episode and mask of each row."""


def group_of(prompt: int, rows: Sequence[tuple[int, Sequence[bool | int]]]) -> TrainGroup:
    """A group whose rows have these episodes and masks, and different tokens."""
    return TrainGroup(
        id="",
        prompt=array("i", [place * 5 % (VOCABULARY - 1) + 1 for place in range(prompt)]),
        rows=[
            TrainRow(
                token_ids=array("i", [(number * 11 + place * 7) % (VOCABULARY - 1) + 1 for place in range(len(mask))]),
                mask=bytes(mask),
                behaviour=array("f", [-1.0] * len(mask)),
                advantages=array("d", [1.0 if on else 0.0 for on in mask]),
                sequence=sequence,
                on_policy=b"\1" * sum(mask),
                policies=[""] * sum(mask),
                engines=[""] * sum(mask),
            )
            for number, (sequence, mask) in enumerate(sorted(rows, key=lambda row: row[0]))
        ],
    )


def even_group(prompt: int, rows: int, length: int) -> TrainGroup:
    return group_of(prompt, [(number, [1] * length) for number in range(rows)])


def plain_rows(policy: PolicyModel, group: TrainGroup) -> list[Tensor]:
    """Log-probs of the sampled tokens of each row, by the model's own logits of its prompt and the row alone."""
    found: list[Tensor] = []
    for row in group.rows:
        ids = torch.tensor([[*group.prompt, *row.token_ids]])
        scores = policy.peft(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = [0] * len(group.prompt) + list(row.mask)
        found.append(scores[torch.tensor(mask[1:], dtype=torch.bool)])
    return found


def assert_plain(policy: PolicyModel, group: TrainGroup, tolerance: float) -> None:
    """Log-probs, a loss and its gradient are those of plain rows."""
    found, expected = logprobs_by_row(policy, group), plain_rows(policy, group)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    if not group.sampled:
        return
    losses = [(torch.cat(some) ** 2).mean() for some in (found, expected)]
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
    ours, theirs = (gradient(policy, loss) for loss in losses)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.abs().max())))


def computed(policy: PolicyModel, group: TrainGroup) -> int:
    return sum(map(policy.tokens_of, policy.passes([(0, group)])))


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def policy(request: pytest.FixtureRequest, models: dict[str, Path]) -> PolicyModel:
    return make_policy(models[request.param], disturb=0.3, dtype="float64", gradient_checkpointing=True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.integers(1, 40), rows=ROWS, limit=st.integers(1, 300))
def test_a_shared_prompt_gives_log_probs_and_gradients_of_plain_rows(
    policy: PolicyModel, prompt: int, rows: list[tuple[int, list[bool]]], limit: int
) -> None:
    group = group_of(prompt, rows)
    policy.tokens_per_pass = limit
    assert_plain(policy, group, 1e-6)  # float64, apart from the norms of these families
    passes = policy.passes([(0, group)])
    assert sorted(id(row) for some in passes for piece in some for row in piece.rows) == sorted(map(id, group.rows))
    for some in passes:
        (piece,) = some
        one_episode = len({row.sequence for row in piece.rows}) == 1
        assert policy.tokens_of(some) <= limit or one_episode, "only one episode is above the limit"


@pytest.mark.parametrize("options", [{}, {"activation_offload": True}])
def test_a_shared_prompt_is_exact_in_float32(
    options: dict[str, bool], models: dict[str, Path], policy_of: Maker
) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3, gradient_checkpointing=True, **options)
    several_turns = [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    group = group_of(60, [(0, [1] * 20), (1, several_turns), (1, several_turns * 2), (2, [1])])
    assert computed(policy, group) == 60 + 20 + 12 + 24 + 1
    assert_plain(policy, group, 1e-6)


def test_each_pass_of_a_long_group_computes_its_prompt_once(policy: PolicyModel) -> None:
    group = even_group(40, 9, 20)
    policy.tokens_per_pass = 100
    assert [len(piece.rows) for (piece,) in policy.passes([(0, group)])] == [3, 3, 3]
    assert computed(policy, group) == 3 * (40 + 3 * 20)
    policy.tokens_per_pass = 1000
    assert computed(policy, group) == 40 + 9 * 20
    policy.tokens_per_pass = 30
    assert computed(policy, group) == 9 * (40 + 20), "a prompt above the limit leaves an episode a pass"


def test_only_a_family_that_cannot_pack_keeps_a_cache(models: dict[str, Path], tmp_path: Path) -> None:
    for checkpointing in (False, True):
        assert not make_policy(models["llama"], gradient_checkpointing=checkpointing).shares_prompt(array("i", [1]))
    folder = model_with_a_window(tmp_path)
    assert make_policy(folder).shares_prompt(array("i", [1]))
    assert not make_policy(folder, gradient_checkpointing=True).shares_prompt(array("i", [1]))
    assert_plain(make_policy(folder, disturb=0.3), even_group(10, 3, 5), 1e-6)


@pytest.mark.parametrize(
    ("prompt", "rows", "device", "shared"),
    [
        (512, [64] * 8, "cpu", True),
        (50, [400, 10], "cpu", True),
        (50, [401, 10], "cpu", False),
        (50, [401, 10], "cuda", True),
        (512, [64], "cuda", False),
        (0, [64] * 8, "cuda", False),
    ],
)
def test_prompts_are_shared_where_that_is_faster(prompt: int, rows: list[int], device: str, shared: bool) -> None:
    assert packing.shares_prompt(prompt, rows, device) is shared


@given(prompt=st.integers(0, 100), rows=st.lists(st.integers(1, 900), min_size=2, max_size=6))
def test_rows_of_a_group_that_shares_its_prompt_share_it(prompt: int, rows: list[int]) -> None:
    """The rows of a pass are some of a group's, and their limit is that of the group's decision."""
    if packing.shares_prompt(prompt, rows, "cpu"):
        assert packing.shares_prompt(prompt, rows[1:], "cpu") or len(rows) == 2


@pytest.mark.parametrize(
    ("limit", "device", "prompt", "largest"),
    [(16384, "cpu", 0, 1024), (16384, "cpu", 800, 1600), (900, "cpu", 800, 900), (16384, "cuda", 800, 16384)],
)
def test_a_pass_on_a_cpu_has_as_many_tokens_of_rows(limit: int, device: str, prompt: int, largest: int) -> None:
    assert packing.largest_pass(limit, device, prompt) == largest


def test_long_rows_behind_a_short_prompt_are_plain_on_a_cpu(policy: PolicyModel) -> None:
    policy.tokens_per_pass = 1000
    group = even_group(2, 3, 30)
    assert computed(policy, group) == 3 * 32
    assert_plain(policy, group, 1e-6)


def refusing_prompts(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    if getattr(mask, packing.LAYOUT, Layout(segments=[])).shares:
        raise ValueError("a mask of this form is unknown")
    return packing.attention(module, query, key, value, mask, **options)


def forgetting_prompts(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    layout = getattr(mask, packing.LAYOUT, Layout(segments=[]))
    if layout.shares:
        return forgetful(module, query, key, value, mask, **options)
    return packing.attention(module, query, key, value, mask, **options)


def keeping_prompts(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Right states, and no gradient through the keys."""
    return packing.attention(module, query, key.detach(), value, mask, **options)


@pytest.mark.parametrize("other", [refusing_prompts, forgetting_prompts])
def test_a_family_that_cannot_share_prompts_packs_plain_rows_and_says_so(
    other: Callable[..., Any],
    models: dict[str, Path],
    policy_of: Maker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, packing.NAME, other)
    policy = policy_of(models["llama"], disturb=0.3, gradient_checkpointing=True)
    group = even_group(10, 3, 5)
    assert computed(policy, group) == 3 * 15
    assert "rows are not packed behind one copy of their prompt" in caplog.text
    assert_plain(policy, group, 1e-6)


def test_a_kernel_with_another_gradient_is_not_used(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing.packed_hidden

    def without_keys(*args: Any, **options: Any) -> Tensor:
        with monkeypatch.context() as context:
            context.setitem(AttentionInterface._global_mapping, packing.NAME, keeping_prompts)
            return original(*args, **options)

    assert kernels.sharing_kernel(policy._body, policy.device) is Kernel.ROWS
    monkeypatch.setattr(packing, "packed_hidden", without_keys)
    assert kernels.sharing_kernel(policy._body, policy.device) is None


@pytest.mark.parametrize(
    ("heads", "device", "expected"),
    [(8, "cuda", [Kernel.ROWS]), (16, "cuda", [Kernel.FLEX, Kernel.ROWS]), (64, "cpu", [Kernel.ROWS])],
)
def test_heads_too_narrow_for_flex_attention_are_computed_by_rows_and_the_log_says_so_once(
    heads: int, device: str, expected: list[Kernel], tmp_path: Path, policy_of: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    body = policy_of(wide_model(tmp_path, head_dim=heads))._body
    caplog.clear()
    assert kernels.candidates(kernels.width_of_heads(body), device) == expected
    assert caplog.text.count("at least 16, and this model's are 8 wide") == (heads == 8)


SEGMENTS = st.builds(PackedSegment, st.integers(0, 400), st.lists(st.integers(0, 300), max_size=4))
LAYOUTS = st.builds(
    Layout, segments=st.lists(SEGMENTS, min_size=1, max_size=4).filter(lambda some: any(p + sum(r) for p, r in some))
)


@settings(deadline=None, max_examples=40)
@given(layout=LAYOUTS)
@example(layout=Layout(segments=[PackedSegment(256, [128, 256])]))
@example(layout=Layout(segments=[PackedSegment(200, [56, 300, 0, 1])]))
@example(layout=Layout(segments=[PackedSegment(BLOCK, [BLOCK, BLOCK]), PackedSegment(BLOCK, [BLOCK])]))
@example(layout=Layout(segments=[PackedSegment(0, [300, 5]), PackedSegment(400, [100, 300]), PackedSegment(1, [])]))
@example(
    layout=Layout(
        segments=[
            PackedSegment(100, [28]),
            PackedSegment(0, [128]),
            PackedSegment(0, []),
            PackedSegment(129, [127, 128]),
        ]
    )
)
def test_a_block_mask_shows_each_token_its_prompt_and_its_row(layout: Layout) -> None:
    """Against a mask written from the segments, and the blocks that torch makes of all pairs of tokens."""
    expected = torch.zeros(sum(layout.sizes), sum(layout.sizes), dtype=torch.bool)
    start = 0
    for prompt, rows in layout.segments:
        first, start = start, start + prompt
        expected[first:start, first:start] = True
        for row in rows:
            expected[start : start + row, first : first + prompt] = True
            expected[start : start + row, start : start + row] = True
            start += row
    expected = expected.tril()
    mask = block_mask(layout, torch.device("cpu"))
    found = flex.create_mask(mask.mask_mod, None, None, len(expected), len(expected), device="cpu")
    assert torch.equal(found[0, 0], expected)
    other = flex.create_block_mask(mask.mask_mod, None, None, len(expected), len(expected), device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(mask, name), getattr(other, name)), name
    assert (mask.BLOCK_SIZE, mask.shape) == (other.BLOCK_SIZE, other.shape)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_states_of_plain_rows(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its kernel, which a CPU has for the forward pass only."""
    calls: list[Any] = []

    def uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any) -> Any:
        assert not training
        calls.append(options["block_mask"])
        return flex.flex_attention(query, key, value, **options)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", uncompiled)
    policy.tokens_per_pass = 1000
    group = even_group(150, 4, 30)
    monkeypatch.setattr(policy, "_kernel", Kernel.FLEX)
    with torch.no_grad():
        found = logprobs_by_row(policy, group)
        expected = plain_rows(policy, group)
    assert len(calls) == 2, "an attention for each layer"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_step_reports_the_share_of_tokens_that_it_computes(models: dict[str, Path], policy_of: Maker) -> None:
    groups = [even_group(40, 4, 10), even_group(1, 2, 30)]
    for options, expected in (
        ({"gradient_checkpointing": True}, (40 + 4 * 10 + 2 * 31) / (4 * 50 + 2 * 31)),
        ({}, (40 + 4 * 10 + 2 * 31) / (4 * 50 + 2 * 31)),
    ):
        policy = policy_of(models["llama"], tokens_per_pass=100, **options)
        result = Trainer(policy, algorithm(), 1.0).step(groups, 0)
        assert result.diagnostics["computed_tokens_share"] == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_flex_attention_has_log_probs_and_gradients_of_plain_rows_on_a_gpu(tmp_path: Path, policy_of: Maker) -> None:
    folder = wide_model(tmp_path)
    here = policy_of(folder, disturb=0.3, gradient_checkpointing=True)
    there = policy_of(folder, gradient_checkpointing=True, device="cuda")
    there.load_trained_state(here.trained_state())
    assert there._kernel is Kernel.FLEX
    for group in (even_group(300, 8, 70), even_group(5, 3, 200), group_of(64, [(0, [1]), (1, [0, 0, 1] * 50)])):
        found, expected = logprobs_by_row(there, group), plain_rows(here, group)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-5)
        ours = gradient(there, (torch.cat(found) ** 2).mean()).cpu()
        theirs = gradient(here, (torch.cat(expected) ** 2).mean())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_shared_prompt_lowers_the_peak_of_a_gpu(
    tmp_path: Path, policy_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, group = wide_model(tmp_path), even_group(1024, 8, 64)
    peaks: list[int] = []
    for kernel in (Kernel.FLEX, Kernel.ROWS, None):
        policy = policy_of(folder, dtype="bfloat16", gradient_checkpointing=True, device="cuda")
        monkeypatch.setattr(policy, "_kernel", kernel)
        gradient(policy, torch.cat(logprobs_by_row(policy, group)).mean())
        torch.cuda.reset_peak_memory_stats()
        gradient(policy, torch.cat(logprobs_by_row(policy, group)).mean())
        peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks[:2]) < peaks[2]
