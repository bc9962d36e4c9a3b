"""The token arrays from which an algorithm computes its loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrl.algorithms import TokenBatch, Totals
from kestrl_learner.algorithms import AGGREGATIONS
from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.batch.tokens import sequence_tokens, stream


def token_batch(
    group: TrainGroup,
    rows: Sequence[TrainRow],
    *,
    logprobs: Tensor,
    behaviour: Tensor,
    old: Tensor,
    reference: Tensor | None,
    totals: Totals,
    aggregation: str,
    horizon: int,
) -> TokenBatch:
    """The sampled tokens of some of a group's rows, as an algorithm's loss takes them.

    Args:
        group: Of the rows.
        rows: Of one pass.
        logprobs: (N,) of the sampled tokens in row order, with gradient; the result has its type and device.
        behaviour: (N,) as the engine reported them.
        old: (N,) under the weights that the step began with.
        reference: (N,) under the base model, if the algorithm needs them.
        totals: Of the update.
        aggregation: How tokens are weighed.
        horizon: Length that some aggregations divide by.
    """
    weigh, tokens = AGGREGATIONS[aggregation], sequence_tokens(group)
    sampled = [sum(row.mask) for row in rows]
    numbers = {sequence: number for number, sequence in enumerate(dict.fromkeys(row.sequence for row in rows))}

    def per_token(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        given = [value for value, count in zip(values, sampled, strict=True) for _ in range(count)]
        return torch.tensor(given, dtype=dtype, device=logprobs.device)

    return TokenBatch(
        logprobs=logprobs,
        behaviour=behaviour,
        old=old,
        reference=reference,
        advantages=torch.tensor(
            stream(rows, [row.advantages for row in rows]), dtype=logprobs.dtype, device=logprobs.device
        ),
        weights=per_token([weigh(tokens.get(row.sequence, 1), totals, horizon) for row in rows], logprobs.dtype),
        sequences=per_token([numbers[row.sequence] for row in rows], torch.long),
        groups=per_token([0] * len(rows), torch.long),
        totals=totals,
    )
