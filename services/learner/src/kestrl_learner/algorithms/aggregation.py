"""How token losses add up to the loss of a step: the weight of each sampled token, from counts over the whole batch.

A weight depends on global counts alone, so micro-batches, their order and the number of ranks do not change loss or
gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from kestrl.algorithms import Totals

Aggregation = Callable[[int, Totals, int], float]
"""(sampled tokens of the token's episode, totals of the batch, horizon) -> weight of the token."""

AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": lambda _tokens, totals, _horizon: 1.0 / totals.tokens,
    "token_sum": lambda _tokens, _totals, _horizon: 1.0,
    "seq_mean_token_sum": lambda _tokens, totals, _horizon: 1.0 / totals.sequences,
    "seq_mean_token_sum_norm": lambda _tokens, totals, horizon: 1.0 / (totals.sequences * horizon),
    "seq_mean_token_mean": lambda tokens, totals, _horizon: 1.0 / (totals.sequences * tokens),
}
"""The names are verl's `loss_agg_mode`s. token_mean: DAPO (arXiv 2503.14476). seq_mean_token_sum_norm: Dr.GRPO (arXiv
2503.20783), divided by a constant horizon. seq_mean_token_mean: GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071). An
episode without a sampled token has no weight and is not counted; an episode in several rows weighs as one.
"""
