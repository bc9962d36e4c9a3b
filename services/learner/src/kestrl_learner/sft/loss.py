"""Cross-entropy of the learned tokens, as an algorithm of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kestrl.algorithms import ScoredEpisode, TokenBatch


class CrossEntropy:
    """Mean of -log pi over all learned tokens of a step."""

    needs_reference = False
    aggregation = "token_mean"

    def advantages(self, batch: Sequence[Sequence[ScoredEpisode]]) -> list[list[list[float]]]:
        """1 for every token."""
        return [[[1.0] * episode.tokens for episode in group] for group in batch]

    def loss(self, batch: TokenBatch) -> Tensor:
        return -(batch.weights * batch.logprobs).sum()

    def accept(self, rewards: Sequence[float]) -> bool:  # noqa: ARG002 - nothing is compared
        return True
