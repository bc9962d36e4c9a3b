"""Rows one behind the other in one sequence, each with positions and attention of its own, so that no padding is
computed. A prompt that all of them share may stand before them and is then computed once: each row sees the prompt and
itself, and its positions go on from the prompt's.

The layout of the sequence travels as the attention mask, which every family of models hands to its attention unchanged.
Attention is then computed row by row, with the prompt's keys and values before the row's own, or on CUDA by
FlexAttention. A dense mask of the whole sequence would cost the square of its length.
"""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kestrl_learner.batch.rows import TrainRow

log = logging.getLogger(__name__)
NAME = "kestrl_rows"
"""Name in transformers' registry of attention: as `sdpa`, and by the layout where the mask is a `layout_mask`."""
LAYOUT = "kestrl_layout"
"""Attribute of an attention mask with the layout of a packed sequence."""
TOKENS_ON_CPU = 1024
"""Largest number of tokens of a pass on a CPU, where larger passes are hardly faster and take memory in proportion."""
BLOCK = 128
"""Tokens of a block of FlexAttention's mask."""
LEAST_WIDTH = 16
"""Least width of a head that FlexAttention computes on CUDA."""
LONGEST_ROW_ON_CPU = 8
"""Largest length of a row behind a shared prompt on a CPU, in lengths of the prompt."""


class Kernel(StrEnum):
    """Computes the attention of a packed sequence."""

    ROWS = "attention row by row"
    FLEX = "FlexAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Lengths of what a packed sequence holds."""

    prompt: int
    """Tokens that all rows see, at the beginning; 0 without a shared prompt."""
    rows: Sequence[int]
    """Tokens of each row."""
    blocks: BlockMask | None = None
    """The mask of FlexAttention; None if attention is computed row by row."""

    def positions(self) -> list[int]:
        """Position of each token in the text of its row."""
        places = [self.prompt + place for length in self.rows for place in range(length)]
        return [*range(self.prompt), *places]

    def row_of_tokens(self) -> list[int]:
        """Number of each token's row; 0 is the prompt, and rows are counted from 1."""
        return [0] * self.prompt + [number for number, length in enumerate(self.rows, 1) for _ in range(length)]


def layout_mask(layout: Layout, device: torch.device) -> Tensor:
    """The attention mask of a packed sequence: a tensor of no values that carries its layout."""
    mask = torch.zeros((1, 1, 1, len(layout.rows)), dtype=torch.long, device=device)
    setattr(mask, LAYOUT, layout)
    return mask


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """The mask of FlexAttention, in which each token sees the prompt and its own row, up to itself.

    Equal to torch's `create_block_mask`, which makes the mask of all pairs of tokens first.
    """
    rows = layout.row_of_tokens()
    row = torch.tensor(rows, device=device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & ((row[key] == 0) | (row[query] == row[key]))

    some, whole = (_ordered(blocks.to(device)) for blocks in _blocks(rows))
    lengths = len(rows), len(rows)
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _blocks(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Blocks of queries and keys, (blocks, blocks), of which some pairs see each other, and those of which all do.

    Args:
        rows: The row of each token, ascending; 0 is the prompt.
    """
    parts = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
    first, last = (torch.tensor([part[place] for part in parts]) for place in (0, -1))
    own = torch.tensor([next((row for row in part if row), 0) for part in parts])  # the first that is not the prompt
    earlier = torch.ones(len(parts), len(parts), dtype=torch.bool).tril(-1)
    seen = earlier & ((first == 0) | (last >= first[:, None]))
    one_row = (own == last) & (last == first[:, None]) & (last == last[:, None])
    whole = earlier & ((last == 0) | one_row)
    if len(rows) % BLOCK:
        whole[-1] = False
    return (seen & ~whole) | torch.eye(len(parts), dtype=torch.bool), whole


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, (1, 1, blocks), and their indices before all others, (1, 1, blocks,
    blocks).
    """
    number = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return number[None, None], order[None, None]


def largest_pass(limit: int, device: str, prompt: int = 0) -> int:
    """Largest number of tokens of a packed pass.

    Args:
        limit: The setting, `learner.tokensPerPass`.
        device: Type of the device.
        prompt: Tokens of the prompt that the rows of the pass share. On a CPU the rows may have as many tokens, so that
            a long prompt is not computed for few of them.
    """
    return min(limit, max(TOKENS_ON_CPU, 2 * prompt)) if device == "cpu" else limit


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
        found: Any = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    if layout.blocks is not None:
        return flex_attention_forward(module, query, key, value, layout.blocks, **options)[0], None
    return _row_by_row(layout, module, query, key, value, options), None


def _row_by_row(
    layout: Layout, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """As `attention`, of a packed sequence."""
    sizes = [layout.prompt, *layout.rows]
    queries, keys, values = (whole.split(sizes, dim=2) for whole in (query, key, value))
    found: list[Tensor] = []
    for number, (own_query, own_key, own_value) in enumerate(zip(queries, keys, values, strict=True)):
        mask = None
        seen_key, seen_value = own_key, own_value
        if number and layout.prompt:
            seen_key = torch.cat([keys[0], own_key], dim=2)
            seen_value = torch.cat([values[0], own_value], dim=2)
            shape = own_query.shape[2], seen_key.shape[2]
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(layout.prompt)
        if own_query.shape[2]:
            own, _ = sdpa_attention_forward(module, own_query, seen_key, seen_value, attention_mask=mask, **options)
            found.append(own)
    return torch.cat(found, dim=1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_hidden(
    body: nn.Module,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    *,
    prompt: Sequence[int] = (),
    kernel: Kernel = Kernel.ROWS,
) -> Tensor:
    """Last hidden states of rows of token ids, one behind the other: shape (all tokens, hidden size).

    Args:
        body: The model without its head.
        rows: Token ids of each row.
        device: The model's.
        prompt: Token ids that stand before the rows once, and that each of them sees.
        kernel: Computes the attention of rows that share a prompt.
    """
    layout = Layout(prompt=len(prompt), rows=[len(row) for row in rows])
    if kernel is Kernel.FLEX and prompt:
        layout = replace(layout, blocks=block_mask(layout, device))
    ids = torch.tensor([*prompt, *(token for row in rows for token in row)], device=device)
    places = torch.tensor(layout.positions(), device=device)
    mask = layout_mask(layout, device)
    found: Any = body(input_ids=ids[None], position_ids=places[None], attention_mask=mask, use_cache=False)
    return found.last_hidden_state[0]


class Packed(NamedTuple):
    """Rows to compute in one sequence."""

    prompt: Sequence[int]
    """Token ids before all rows; empty if each has its own prompt."""
    rows: list[Sequence[int]]
    """Token ids of each row, without what follows the last sampled token."""
    states: list[int]
    """Places, among all these ids, of the states that predict the sampled tokens."""
    targets: list[int]
    """The sampled tokens."""


def packed(prompt: array[int], rows: Sequence[TrainRow], *, shared: bool) -> Packed:
    """The rows behind their prompt, which is shared or stands before each of them."""
    before = array("i") if shared else prompt
    found = Packed(prompt if shared else (), [], [], [])
    offset = len(found.prompt)
    for row in rows:
        ids = [*before, *row.token_ids]
        sampled = [len(before) + place for place, on in enumerate(row.mask) if on]
        assert shared or 0 not in sampled, "nothing predicts the first token of a row"
        found.rows.append(ids[: max(sampled, default=0 if shared else 1)])
        found.states.extend(offset + place - 1 if place else len(found.prompt) - 1 for place in sampled)
        found.targets.extend(ids[place] for place in sampled)
        offset += len(found.rows[-1])
    return found


def enable(base: Any) -> bool:
    """Sets the attention of a model to `NAME`; returns whether it did.

    Models with attention windows, with layers other than attention, or with an attention of their own keep theirs.
    """
    config = base.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if base.config._attn_implementation != "sdpa" or others or windows:
        log.info("rows are padded and not packed: attention of this family is not that of whole rows in every layer")
        return False
    base.set_attn_implementation(NAME)
    return True


def disable(base: Any) -> None:
    """The inverse of `enable`."""
    base.set_attn_implementation("sdpa")


def exact(body: nn.Module, device: torch.device) -> bool:
    """Whether two packed rows have the states that each has by itself; the log says why not."""
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    with torch.no_grad():
        problem = _difference(body, [], rows, lambda: packed_hidden(body, rows, device), device)
    if problem:
        log.info("rows are padded and not packed: %s", problem)
    return not problem


def sharing_kernel(body: nn.Module, device: torch.device) -> Kernel | None:
    """The kernel by which rows behind a shared prompt have the states and the gradient that each has by itself; None if
    there is none. The log says which, and why not another.
    """
    prompt, rows = [1, 2, 3, 4, 5, 6], [[7, 8, 9], [10, 11, 12, 13]]
    for kernel in candidates(width_of_heads(body), device.type):

        def found(kernel: Kernel = kernel) -> Tensor:
            return packed_hidden(body, rows, device, prompt=prompt, kernel=kernel)

        problem = _difference(body, prompt, rows, found, device)
        if not problem:
            log.info("the rows of a group are packed behind one copy of their prompt: %s", kernel)
            return kernel
        log.warning("rows are not packed behind one copy of their prompt by %s: %s", kernel, problem)
    return None


def candidates(width: int, device: str) -> list[Kernel]:
    """The kernels that may compute rows behind a shared prompt, the fastest first. The log says why FlexAttention is
    none of them on CUDA.

    Args:
        width: Of a head.
        device: Type of the device.
    """
    if device != "cuda":
        return [Kernel.ROWS]
    if width < LEAST_WIDTH:
        log.warning(
            "rows behind a shared prompt are computed one by one, which is slower: FlexAttention needs heads of a "
            "width of at least %d, and this model's are %d wide",
            LEAST_WIDTH,
            width,
        )
        return [Kernel.ROWS]
    return [Kernel.FLEX, Kernel.ROWS]


def width_of_heads(body: Any) -> int:
    """Width of an attention head."""
    config = body.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _difference(
    body: nn.Module,
    prompt: Sequence[int],
    rows: Sequence[Sequence[int]],
    compute: Callable[[], Tensor],
    device: torch.device,
) -> str:
    """What is wrong with the states, or their gradient, of a packed sequence; empty if they are those of its rows.

    The difference must be of the size of rounding, and far below what one row that saw the other would make: in
    bfloat16 the first alone would not tell.
    """
    alone = [_alone(body, [*prompt, *row], device) for row in rows]
    expected = torch.cat([alone[0][: len(prompt)], *(states[len(prompt) :] for states in alone)])
    one_row = _alone(body, [*prompt, *(token for row in rows for token in row)], device)
    influence = float((one_row - expected).detach().abs().max())
    try:
        states = compute()
        slope = _gradient(body, states)
    except (RuntimeError, TypeError, ValueError) as error:  # a family that makes something of the mask before
        return str(error).strip().partition("\n")[0] or type(error).__name__
    rounding = 8 * torch.finfo(expected.dtype).eps
    found = float((states - expected).detach().abs().max())
    if not found <= min(max(1e-4, rounding) * float(expected.detach().abs().max()), influence / 8):
        return f"states of packed rows differ by {found:g}"
    right = _gradient(body, expected)
    off = float((slope - right).norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny))
    return "" if off <= max(1e-3, 2 * rounding) else f"gradients of packed rows differ by {off:.1%}"


def _gradient(body: nn.Module, states: Tensor) -> Tensor:
    """Gradient of a weighted sum of states for the first trained weights, on which all layers act; empty where
    gradients are disabled.
    """
    trained = [weight for weight in body.parameters() if weight.requires_grad][:2] if states.requires_grad else []
    if not trained:
        return states.new_zeros(0)
    weights = torch.linspace(-1, 1, states.numel(), device=states.device, dtype=states.dtype).view_as(states)
    return torch.cat([slope.flatten() for slope in torch.autograd.grad((states * weights).sum(), trained)])


def _alone(body: nn.Module, row: Sequence[int], device: torch.device) -> Tensor:
    """Last hidden states of one row: shape (tokens, hidden size)."""
    found: Any = body(input_ids=torch.tensor([row], device=device), use_cache=False)
    return found.last_hidden_state[0]
