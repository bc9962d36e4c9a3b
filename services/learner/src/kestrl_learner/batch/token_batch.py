"""The token arrays from which an algorithm computes its loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrl.algorithms import TokenBatch, Totals
from kestrl_learner.algorithms import AGGREGATIONS
from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.tokens import sequence_tokens, stream


def token_batch(
    pieces: Sequence[Piece],
    *,
    logprobs: Tensor,
    behaviour: Tensor,
    old: Tensor,
    reference: Tensor | None,
    totals: Totals,
    aggregation: str,
    horizon: int,
) -> TokenBatch:
    """The sampled tokens of a pass, as an algorithm's loss takes them.

    Args:
        pieces: Of the pass.
        logprobs: (N,) of the sampled tokens, piece by piece in row order, with gradient; the result has its type and
            device.
        behaviour: (N,) as the engine reported them.
        old: (N,) under the weights that the step began with.
        reference: (N,) under the base model, if the algorithm needs them.
        totals: Of the update.
        aggregation: How tokens are weighed.
        horizon: Length that some aggregations divide by.
    """
    weigh = AGGREGATIONS[aggregation]
    advantages: list[float] = []
    weights: list[float] = []
    sequences: list[int] = []
    groups: list[int] = []
    episodes: dict[tuple[int, int], int] = {}
    for number, piece in enumerate(pieces):
        tokens = sequence_tokens(piece.group)
        advantages += stream(piece.rows, [row.advantages for row in piece.rows])
        for row in piece.rows:
            if not (sampled := sum(row.mask)):
                continue  # episodes are numbered by their tokens
            weights += [weigh(tokens.get(row.sequence, 1), totals, horizon)] * sampled
            sequences += [episodes.setdefault((number, row.sequence), len(episodes))] * sampled
            groups += [number] * sampled

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logprobs.device)

    return TokenBatch(
        logprobs=logprobs,
        behaviour=behaviour,
        old=old,
        reference=reference,
        advantages=tensor(advantages, logprobs.dtype),
        weights=tensor(weights, logprobs.dtype),
        sequences=tensor(sequences, torch.long),
        groups=tensor(groups, torch.long),
        totals=totals,
    )
