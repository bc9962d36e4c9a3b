"""Where the rows of a packed sequence stand, which tokens each of them sees, and their positions.

A sequence has a segment for each group: the prompt that its rows share, and the rows. A token sees its own row and the
prompt of its segment, up to itself, and nothing of other segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

LAYOUT = "kestrl_layout"
"""Attribute of an attention mask with the layout of a packed sequence."""
BLOCK = 128
"""Tokens of a block of FlexAttention's mask."""


class PackedSegment(NamedTuple):
    """Lengths of the rows of a group in a packed sequence."""

    prompt: int
    """Tokens before the rows, which all of them see; 0 if they share none."""
    rows: Sequence[int]
    """Tokens of each row."""


class CausalMask:
    """The mask of a row behind a prompt: the row sees all of the prompt, and itself up to each token.

    The masks of all rows of a sequence are parts of one, that of the longest row behind the longest prompt.
    """

    def __init__(self, segments: Sequence[PackedSegment], device: torch.device) -> None:
        shared = [segment for segment in segments if segment.prompt]
        self._prompt = max((segment.prompt for segment in shared), default=0)
        row = max((length for segment in shared for length in segment.rows), default=0)
        self._sees = torch.ones((row, self._prompt + row), dtype=torch.bool, device=device).tril(self._prompt)
        self._added: dict[torch.dtype, Tensor] = {}

    def part(self, prompt: int, row: int, dtype: torch.dtype) -> Tensor:
        """The mask of one row, (tokens of the row, tokens of both).

        Args:
            prompt: Tokens of its prompt.
            row: Tokens of the row.
            dtype: Of the query. On a CPU the mask holds numbers to add, which torch would make of booleans in each
                layer.
        """
        mask = self._sees
        if mask.device.type == "cpu":
            if dtype not in self._added:
                numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
                self._added[dtype] = numbers.masked_fill_(~mask, float("-inf"))
            mask = self._added[dtype]
        return mask[:row, self._prompt - prompt : self._prompt + row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a packed sequence holds."""

    segments: Sequence[PackedSegment]
    blocks: BlockMask | None = None
    """The mask of FlexAttention; None if attention is computed row by row."""
    causal: CausalMask | None = None
    """The masks of rows behind a prompt, if attention is computed row by row."""

    @property
    def sizes(self) -> list[int]:
        """Tokens of each prompt and of the rows behind it, in their order."""
        return [size for prompt, rows in self.segments for size in (prompt, *rows)]

    @property
    def shares(self) -> bool:
        """Whether rows share a prompt."""
        return any(prompt for prompt, _ in self.segments)

    def positions(self) -> list[int]:
        """Position of each token in the text of its row."""
        spans = (
            (range(prompt), *(range(prompt, prompt + length) for length in rows)) for prompt, rows in self.segments
        )
        return list(chain.from_iterable(chain.from_iterable(spans)))

    def row_of_tokens(self) -> Tensor:
        """Number of each token's row; the prompt of a segment is a row, and its number one below its first row's."""
        return _repeated(range(len(self.sizes)), self.sizes)

    def prompt_of_tokens(self) -> Tensor:
        """Number of the prompt that each token sees, whether or not it has tokens."""
        counts = [1 + len(rows) for _, rows in self.segments]
        first = list(accumulate(counts, initial=0))[:-1]
        return _repeated(first, [prompt + sum(rows) for prompt, rows in self.segments])


def _repeated(values: Sequence[int], counts: Sequence[int]) -> Tensor:
    return torch.tensor(list(values)).repeat_interleave(torch.tensor(counts))


def layout_mask(layout: Layout, device: torch.device) -> Tensor:
    """The attention mask of a packed sequence: a tensor of no values that carries its layout. It is the same for all
    layouts, since a compiled layer knows it by its shape.
    """
    mask = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    setattr(mask, LAYOUT, layout)
    return mask


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """The mask of FlexAttention, in which each token sees the prompt of its segment and its own row, up to itself.

    Equal to torch's `create_block_mask`, which makes the mask of all pairs of tokens first.
    """
    rows, prompts = layout.row_of_tokens(), layout.prompt_of_tokens()
    row, prompt = rows.to(device), prompts.to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & ((row[query] == row[key]) | (prompt[query] == row[key]))

    partial_blocks, full_blocks = (_ordered(blocks.to(device)) for blocks in _blocks(rows, prompts))
    lengths = len(rows), len(rows)
    return BlockMask.from_kv_blocks(*partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


class _Block(NamedTuple):
    """A block of each tensor: rows and prompts of its first and last token, (blocks,)."""

    first: Tensor
    last: Tensor
    second: Tensor
    """The first row after `first` in the block; `first` if it has one row."""
    prompt: Tensor
    """The prompt that the first token sees."""
    last_prompt: Tensor


def _block(rows: Tensor, prompts: Tensor) -> _Block:
    borders = [*range(0, len(rows), BLOCK), len(rows)]
    first, last = torch.tensor(borders[:-1]), torch.tensor(borders[1:]) - 1
    changes = [rows[start:end] for start, end in pairwise(borders)]
    second = torch.stack([part[(part != part[0]).nonzero()[:1].sum()] for part in changes])
    return _Block(rows[first], rows[last], second, prompts[first], prompts[last])


def _blocks(rows: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of queries and keys, (blocks, blocks), of which some pairs see each other, and those of which all do.

    A block of keys before that of the queries is seen where it holds tokens of the first query's row or of its prompt:
    other rows of the queries, and the prompts of other segments, begin in the queries' own block.

    Args:
        rows: The row of each token, ascending.
        prompts: The prompt that each token sees.
    """
    part = _block(rows, prompts)
    count = len(part.first)
    earlier_pairs = torch.ones(count, count, dtype=torch.bool).tril(-1)
    number, before = part.first[:, None], part.prompt[:, None]
    lengths = torch.bincount(rows, minlength=int(prompts.max()) + 1)
    of_prompt = (part.first <= before) & (part.last >= before) & (lengths[part.prompt] > 0)[:, None]
    seen_pairs = earlier_pairs & ((part.last == number) | of_prompt)
    one_segment = (part.prompt == part.last_prompt)[:, None]
    one_row = (part.first == part.last)[:, None]
    only_prompt = (part.first == before) & (part.last == before)
    only_own = (
        one_row & (part.last == number) & ((part.first == number) | ((part.first == before) & (part.second == number)))
    )
    full = earlier_pairs & one_segment & (only_prompt | only_own)
    if len(rows) % BLOCK:
        full[-1] = False
    return (seen_pairs & ~full) | torch.eye(count, dtype=torch.bool), full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, (1, 1, blocks), and their indices before all others, (1, 1, blocks,
    blocks).
    """
    number = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return number[None, None], order[None, None]
