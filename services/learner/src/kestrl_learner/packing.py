"""Rows one behind the other in one sequence, each with positions and attention of its own, so that no padding is
computed.

The lengths of the rows travel as the attention mask, which every family of models hands to its attention unchanged;
attention is then computed row by row, by kernels that know of causality and need no mask. A dense mask of the whole
sequence would cost the square of its length.
"""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kestrl_learner.batch import TrainRow

log = logging.getLogger(__name__)
NAME = "kestrl_rows"
"""Name in transformers' registry of attention: as `sdpa`, and row by row where the mask is `row_lengths`."""
LENGTHS = "kestrl_row_lengths"
"""Attribute of an attention mask with the lengths of packed rows."""
TOKENS_ON_CPU = 1024
"""Largest number of tokens of a pass on a CPU, where larger passes are hardly faster and take memory in proportion."""


def row_lengths(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The attention mask of packed rows: a tensor of no values that carries their lengths."""
    mask = torch.zeros((1, 1, 1, len(lengths)), dtype=torch.long, device=device)
    setattr(mask, LENGTHS, list(lengths))
    return mask


def largest_pass(limit: int, device: str) -> int:
    """Largest number of tokens of a packed pass.

    Args:
        limit: The setting, `learner.tokensPerPass`.
        device: Type of the device.
    """
    return min(limit, TOKENS_ON_CPU) if device == "cpu" else limit


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one layer, of shape (rows, tokens, heads, width of a head).

    Args:
        module: The layer's attention.
        query: Shape (rows, heads, tokens, width).
        key: As `query`, with its own number of heads.
        value: As `key`.
        attention_mask: `row_lengths` of rows packed into one, or a mask as transformers makes it.
        options: As for transformers' `sdpa`.
    """
    lengths: list[int] | None = getattr(attention_mask, LENGTHS, None)
    if lengths is None:
        found: Any = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    queries, keys, values = (whole.split(lengths, dim=2) for whole in (query, key, value))
    rows = [
        sdpa_attention_forward(module, *row, attention_mask=None, **options)[0]
        for row in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(rows, dim=1), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_hidden(body: nn.Module, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Last hidden states of rows of token ids, one behind the other: shape (all tokens, hidden size)."""
    ids = torch.tensor([token for row in rows for token in row], device=device)
    places = torch.cat([torch.arange(len(row), device=device) for row in rows])
    lengths = row_lengths([len(row) for row in rows], device)
    found: Any = body(input_ids=ids[None], position_ids=places[None], attention_mask=lengths, use_cache=False)
    return found.last_hidden_state[0]


def inputs_of(prompt: array[int], rows: Sequence[TrainRow]) -> tuple[list[Sequence[int]], list[int], list[int]]:
    """Token ids of each row behind its prompt, without what follows the last sampled token; places, among all these
    ids, of the states that predict the sampled tokens; and the sampled tokens.
    """
    inputs: list[Sequence[int]] = []
    states: list[int] = []
    targets: list[int] = []
    offset = 0
    for row in rows:
        ids = [*prompt, *row.token_ids]
        sampled = [len(prompt) + place for place, on in enumerate(row.mask) if on]
        assert 0 not in sampled, "nothing predicts the first token of a row"
        inputs.append(ids[: max(sampled, default=1)])
        states += [offset + place - 1 for place in sampled]
        targets += [ids[place] for place in sampled]
        offset += len(inputs[-1])
    return inputs, states, targets


def enable(base: Any) -> bool:
    """Sets the attention of a model to `NAME`; returns whether it did.

    Models with attention windows, with layers other than attention, or with an attention of their own keep theirs.
    """
    config = base.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if base.config._attn_implementation != "sdpa" or others or windows:
        return False
    base.set_attn_implementation(NAME)
    return True


def disable(base: Any) -> None:
    """The inverse of `enable`."""
    base.set_attn_implementation("sdpa")


@torch.no_grad()
def exact(body: nn.Module, device: torch.device) -> bool:
    """Whether two packed rows have the states that each has by itself.

    The difference must be of the size of rounding, and far below what one row that saw the other would make: in
    bfloat16 the first alone would not tell.
    """
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    expected = torch.cat([_alone(body, row, device) for row in rows])
    influence = float((_alone(body, [token for row in rows for token in row], device) - expected).abs().max())
    try:
        packed = packed_hidden(body, rows, device)
    except (RuntimeError, TypeError, ValueError) as error:  # a family that makes something of the mask before
        log.info("rows are padded and not packed: %s", error)
        return False
    tolerance = max(1e-4, 8 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
    found = float((packed - expected).abs().max())
    if found <= min(tolerance, influence / 8):
        return True
    log.info("rows are padded and not packed: states of packed rows differ by %g", found)
    return False


def _alone(body: nn.Module, row: Sequence[int], device: torch.device) -> Tensor:
    """Last hidden states of one row: shape (tokens, hidden size)."""
    found: Any = body(input_ids=torch.tensor([row], device=device), use_cache=False)
    return found.last_hidden_state[0]
