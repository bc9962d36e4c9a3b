"""Rows one behind the other in one sequence, each with positions and attention of its own, so that no padding is
computed. A prompt that rows share may stand before them and is then computed once: each of them sees the prompt and
itself, and its positions go on from the prompt's. A sequence may hold rows of several groups.

The layout of the sequence travels as the attention mask, which every family of models hands to its attention unchanged.
Attention is then computed row by row, with the prompt's keys and values before the row's own, or on CUDA by
FlexAttention. A dense mask of the whole sequence would cost the square of its length.
"""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kestrl_learner.batch.layout import LAYOUT, CausalMask, Layout, PackedSegment, block_mask, layout_mask
from kestrl_learner.batch.rows import TrainRow

log = logging.getLogger(__name__)
NAME = "kestrl_rows"
"""Name in transformers' registry of attention: as `sdpa`, and by the layout where the mask is a `layout_mask`."""
TOKENS_ON_CPU = 1024
"""Largest number of tokens of a pass on a CPU, where larger passes are hardly faster and take memory in proportion."""
JOINED_ON_CPU = 512
"""As `TOKENS_ON_CPU`, of a pass over several groups."""
LONGEST_ROW_ON_CPU = 8
"""Largest length of a row behind a shared prompt on a CPU, in lengths of the prompt."""


class Kernel(StrEnum):
    """Computes the attention of a packed sequence."""

    ROWS = "attention row by row"
    FLEX = "FlexAttention"


def largest_pass(limit: int, device: str, prompt: int = 0) -> int:
    """Largest number of tokens of a packed pass.

    Args:
        limit: The setting, `learner.tokensPerPass`.
        device: Type of the device.
        prompt: Tokens of the prompt that the rows of the pass share. On a CPU the rows may have as many tokens, so that
            a long prompt is not computed for few of them.
    """
    return min(limit, max(TOKENS_ON_CPU, 2 * prompt)) if device == "cpu" else limit


def largest_joined(limit: int, device: str) -> int:
    """Largest number of tokens of a packed pass over several groups.

    Args:
        limit: The setting, `learner.tokensPerPass`.
        device: Type of the device. On a CPU the passes of groups that are large enough by themselves take less memory.
    """
    return min(limit, JOINED_ON_CPU) if device == "cpu" else limit


def shares_prompt(prompt: int, rows: Sequence[int], device: str) -> bool:
    """Whether rows are packed behind one copy of their prompt, or each behind its own.

    On a CPU attention with a mask, which rows behind a shared prompt need, takes up to twice the time of causal
    attention: with rows much longer than the prompt that is more than the prompt's copies take.

    Args:
        prompt: Tokens of the prompt.
        rows: Tokens of each row after the prompt.
        device: Type of the device.
    """
    if len(rows) < 2 or not prompt:
        return False
    return device != "cpu" or max(rows) <= LONGEST_ROW_ON_CPU * prompt


@torch.compiler.disable(reason="the layout differs from pass to pass")  # pyright: ignore[reportUntypedFunctionDecorator]
def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one layer, of shape (rows, tokens, heads, width of a head).

    Args:
        module: The layer's attention.
        query: Shape (rows, heads, tokens, width).
        key: As `query`, with its own number of heads.
        value: As `key`.
        attention_mask: `layout_mask` of a packed sequence, or a mask as transformers makes it.
        options: As for transformers' `sdpa`.
    """
    layout: Layout | None = getattr(attention_mask, LAYOUT, None)
    if layout is None:
        output: Any = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    if layout.blocks is not None:
        return flex_attention_forward(module, query, key, value, layout.blocks, **options)[0], None
    return _row_by_row(layout, module, query, key, value, options), None


def _row_by_row(
    layout: Layout, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """As `attention`, of a packed sequence."""
    pieces = (tensor.split(layout.sizes, dim=2) for tensor in (query, key, value))
    parts = zip(*pieces, strict=True)
    all_states: list[Tensor] = []

    def attend(of_query: Tensor, seen_key: Tensor, seen_value: Tensor, mask: Tensor | None) -> None:
        if of_query.shape[2]:
            states, _ = sdpa_attention_forward(module, of_query, seen_key, seen_value, attention_mask=mask, **options)
            all_states.append(states)

    for prompt, rows in layout.segments:
        prompt_query, prompt_key, prompt_value = next(parts)
        attend(prompt_query, prompt_key, prompt_value, None)
        for row, (row_query, row_key, row_value) in zip(rows, islice(parts, len(rows)), strict=True):
            if not prompt:
                attend(row_query, row_key, row_value, None)
                continue
            assert layout.causal is not None, "rows behind a prompt have a mask"
            # A copy of the prompt's keys and values for each row: one call for all rows would need a mask of the square
            # of the sequence's length.
            keys, values = torch.cat([prompt_key, row_key], dim=2), torch.cat([prompt_value, row_value], dim=2)
            attend(row_query, keys, values, layout.causal.part(prompt, row, query.dtype))
    return torch.cat(all_states, dim=1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class PackedRows(NamedTuple):
    """Token ids of rows of a group in a packed sequence."""

    prompt: Sequence[int]
    """Before the rows once, and seen by each of them; empty if each has its own prompt."""
    rows: Sequence[Sequence[int]]


def packed_hidden(
    body: nn.Module, packed: Sequence[PackedRows], device: torch.device, *, kernel: Kernel = Kernel.ROWS
) -> Tensor:
    """Last hidden states of rows, one behind the other: shape (all tokens, hidden size).

    Args:
        body: The model without its head.
        packed: Rows of some groups.
        device: The model's.
        kernel: Computes the attention of rows that share a prompt.
    """
    layout = Layout(segments=[PackedSegment(len(prompt), [len(row) for row in rows]) for prompt, rows in packed])
    if layout.shares and kernel is Kernel.FLEX:
        layout = replace(layout, blocks=block_mask(layout, device))
    elif layout.shares:
        layout = replace(layout, causal=CausalMask(layout.segments, device))
    ids = torch.tensor([token for prompt, rows in packed for part in (prompt, *rows) for token in part], device=device)
    places = torch.tensor(layout.positions(), device=device)
    mask = layout_mask(layout, device)
    output: Any = body(input_ids=ids[None], position_ids=places[None], attention_mask=mask, use_cache=False)
    return output.last_hidden_state[0]


class Packed(NamedTuple):
    """Rows to compute in one sequence."""

    rows: list[PackedRows]
    """Rows of each group, without what follows the last sampled token of each."""
    states: list[int]
    """Places, among all their ids, of the states that predict the sampled tokens."""
    targets: list[int]
    """The sampled tokens."""


def packed(groups: Sequence[tuple[array[int], Sequence[TrainRow], bool]]) -> Packed:
    """Rows of some groups behind their prompts.

    Args:
        groups: A prompt, rows that have it, and whether they share it; else it stands before each of them.
    """
    sequence = Packed([], [], [])
    offset = 0
    for prompt, rows, shared in groups:
        before, common = (array("i"), prompt) if shared else (prompt, array("i"))
        first, offset = offset, offset + len(common)
        segment: list[list[int]] = []
        for row in rows:
            ids = [*before, *row.token_ids]
            sampled = [len(before) + place for place, on in enumerate(row.mask) if on]
            assert shared or 0 not in sampled, "nothing predicts the first token of a row"
            # The last sampled token is predicted and predicts nothing, so that it is no input. A row that stands behind
            # a shared prompt may be empty; elsewhere one token is left, since a segment without any has no state.
            segment.append(ids[: max(sampled, default=0 if shared else 1)])
            # The first token behind a shared prompt is predicted by the prompt's last state, which is not beside it.
            sequence.states.extend(offset + place - 1 if place else first + len(common) - 1 for place in sampled)
            sequence.targets.extend(ids[place] for place in sampled)
            offset += len(segment[-1])
        sequence.rows.append(PackedRows(common, segment))
    return sequence


def enable(base: Any) -> bool:
    """Sets the attention of a model to `NAME`; returns whether it did.

    Models with attention windows, with layers other than attention, or with an attention of their own keep theirs.
    """
    # A window counts places in the sequence, where a row is further from a shared prompt than its positions say, and a
    # layer with a recurrent state would carry it from one row into the next.
    config = base.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if base.config._attn_implementation != "sdpa" or layer_types or windows:
        log.info("rows are padded and not packed: attention of this family is not that of whole rows in every layer")
        return False
    base.set_attn_implementation(NAME)
    return True


def disable(base: Any) -> None:
    """The inverse of `enable`."""
    base.set_attn_implementation("sdpa")
