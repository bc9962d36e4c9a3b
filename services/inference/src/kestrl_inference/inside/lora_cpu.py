"""LoRA on a CPU, computed per adapter instead of per token.

vLLM 0.32 has no kernels for adapters on a CPU: it copies an adapter's matrices once for each token of a batch
(`weights[indices]`) and multiplies each copy with one row. For SmolLM2-135M with rank 16 that is 19 MB per token, 6 GB
for a prompt of 300. Here the rows of an adapter are multiplied with its matrices without copies: batches use few
adapters, nearly always one.

Rows are still multiplied one by one: rounding of a product of many rows depends on their number, and samples must not
depend on concurrent requests (`test_killed.py` compares runs to 1e-5).

Rows without an adapter are unchanged. vLLM copies for them too, with the index -1 for "none", which selects the last
slot, so that the base model answers with that adapter. `vllm_plugin` makes vLLM use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class AdapterRows(NamedTuple):
    """Rows of a batch with the same adapter."""

    slot: int
    """Index of the adapter's matrices."""
    rows: slice | torch.Tensor
    """A slice if the rows are contiguous, else their indices."""


def grouped(adapters: Sequence[int], slots: Mapping[int, int]) -> tuple[AdapterRows, ...]:
    """Groups rows by adapter.

    Args:
        adapters: Adapter id of every row; 0 means none.
        slots: Slot of each adapter id.
    """
    rows: dict[int, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter > 0:
            rows.setdefault(adapter, []).append(row)
    return tuple(AdapterRows(slots[adapter], _compact(members)) for adapter, members in rows.items())


def _compact(rows: Sequence[int]) -> slice | torch.Tensor:
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)


def add_lora(
    output: torch.Tensor,
    inputs: torch.Tensor,
    groups: Sequence[AdapterRows],
    stacked_a: Sequence[torch.Tensor],
    stacked_b: Sequence[torch.Tensor],
    parts: Sequence[int],
    scale: float,
) -> None:
    """Adds the adapters' contributions to a layer's output, in place.

    Args:
        output: Shape [rows, sum of parts].
        inputs: Shape [rows, features].
        groups: Rows by adapter.
        stacked_a: For each part of a fused layer (such as q, k and v), shape [slots, 1, rank, features].
        stacked_b: The same with shape [slots, 1, part, rank].
        parts: Widths of the parts in the output.
        scale: Factor of the contributions.
    """
    for slot, rows in groups:
        features = inputs[rows].float().unsqueeze(1)
        start = 0
        for a, b, width in zip(stacked_a, stacked_b, parts, strict=True):
            part = output[:, start : start + width]
            _add(part, rows, _times(_times(features, a[slot].float()).to(part.dtype), b[slot]), scale)
            start += width


def add_embedding(
    output: torch.Tensor, looked_up: torch.Tensor, groups: Sequence[AdapterRows], stacked_b: torch.Tensor
) -> None:
    """Adds the adapters' contributions to embeddings, in place.

    Args:
        output: Shape [rows, features].
        looked_up: Rows of the adapters' embeddings for the tokens, shape [rows, rank].
        groups: Rows by adapter.
        stacked_b: Shape [slots, 1, features, rank].
    """
    for slot, rows in groups:
        _add(output, rows, _times(looked_up[rows].to(output.dtype).unsqueeze(1), stacked_b[slot]), 1.0)


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`rows @ matrix.T` row by row, for shapes [rows, 1, in] and [1, out, in]; the matrix is not copied."""
    return torch.bmm(rows, matrix.mT.expand(len(rows), -1, -1))


def _add(output: torch.Tensor, rows: slice | torch.Tensor, contribution: torch.Tensor, scale: float) -> None:
    if isinstance(rows, slice):
        output[rows].add_(contribution.squeeze(1), alpha=scale)
    else:
        output.index_add_(0, rows, contribution.squeeze(1), alpha=scale)
