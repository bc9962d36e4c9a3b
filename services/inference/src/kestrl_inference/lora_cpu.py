"""LoRA on a CPU, adapter by adapter and not token by token.

vLLM 0.32 has no kernels for adapters on a CPU: it copies an adapter's matrices once for each token of a batch (`weights[indices]`) and
multiplies each copy with one row. Of SmolLM2-135M with rank 16 that is 19 MB a token, 6 GB for a prompt of 300. Here the rows of an
adapter are multiplied with its matrices where they lie: batches name few adapters, nearly always one.

Each row is multiplied by itself all the same: a product of many rows is cut into blocks by their number and rounds by them, and what is
sampled must not depend on what runs beside it (`test_killed.py` compares runs to 1e-5).

And a row without an adapter stays as it is. Copies are taken for it too, by the index -1 that stands for "none": those of the last
slot, whose adapter the base model then answers with. `vllm_plugin` has vLLM use this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """The rows of a batch that one adapter is for."""

    slot: int
    """Where its matrices lie."""
    rows: slice | torch.Tensor
    """A slice where they lie together, else their indices."""


def grouped(adapters: Sequence[int], slots: Mapping[int, int]) -> tuple[Group, ...]:
    """Rows by adapter.

    Args:
        adapters: For every row the id of its adapter; 0 for none.
        slots: Where each adapter lies, by its id.
    """
    rows: dict[int, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter > 0:
            rows.setdefault(adapter, []).append(row)
    return tuple(Group(slots[adapter], _compact(found)) for adapter, found in rows.items())


def _compact(rows: Sequence[int]) -> slice | torch.Tensor:
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)


def add_lora(
    output: torch.Tensor,
    inputs: torch.Tensor,
    groups: Sequence[Group],
    stacked_a: Sequence[torch.Tensor],
    stacked_b: Sequence[torch.Tensor],
    parts: Sequence[int],
    scale: float,
) -> None:
    """Adds what the adapters say to a layer's output, in place.

    Args:
        output: [rows, sum of parts].
        inputs: [rows, features].
        groups: Which rows are whose.
        stacked_a: Of each part of a fused layer (q, k and v in one) [slots, 1, rank, features].
        stacked_b: The same, [slots, 1, part, rank].
        parts: Their widths in the output.
        scale: Factor of it all.
    """
    for slot, rows in groups:
        taken = inputs[rows].float().unsqueeze(1)
        start = 0
        for a, b, width in zip(stacked_a, stacked_b, parts, strict=True):
            part = output[:, start : start + width]
            _add(part, rows, _times(_times(taken, a[slot].float()).to(part.dtype), b[slot]), scale)
            start += width


def add_embedding(
    output: torch.Tensor, looked_up: torch.Tensor, groups: Sequence[Group], stacked_b: torch.Tensor
) -> None:
    """Adds what the adapters say to embeddings, in place.

    Args:
        output: [rows, features].
        looked_up: What the adapters' own embeddings hold for the rows' tokens, [rows, rank].
        groups: Which rows are whose.
        stacked_b: [slots, 1, features, rank].
    """
    for slot, rows in groups:
        _add(output, rows, _times(looked_up[rows].to(output.dtype).unsqueeze(1), stacked_b[slot]), 1.0)


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`rows @ matrix.T` row by row, of [rows, 1, in] and [1, out, in]; the matrix is not copied."""
    return torch.bmm(rows, matrix.mT.expand(len(rows), -1, -1))


def _add(output: torch.Tensor, rows: slice | torch.Tensor, said: torch.Tensor, scale: float) -> None:
    if isinstance(rows, slice):
        output[rows].add_(said.squeeze(1), alpha=scale)
    else:
        output.index_add_(0, rows, said.squeeze(1), alpha=scale)
