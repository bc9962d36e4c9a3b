"""Training algorithms: small pure functions with a registry entry each, and the algorithm that a job's settings compose
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl._shared.spec.algorithms import LOSSES as DECLARED
from kestrl.algorithms import Algorithm, ScoredEpisode, TokenBatch
from kestrl.errors import UserInputError
from kestrl.importing import load
from kestrl_learner.algorithms.advantages import ADVANTAGES, equal
from kestrl_learner.algorithms.aggregation import AGGREGATIONS
from kestrl_learner.algorithms.correction import CORRECTION_WEIGHTS, REJECTIONS
from kestrl_learner.algorithms.kl import KL_ESTIMATORS
from kestrl_learner.algorithms.losses import LOSSES, Bounds, clipped
from kestrl_learner.algorithms.user import UserAlgorithm


class ComposedAlgorithm:
    """An advantage estimator, a loss, an aggregation and an optional KL term, each chosen by name."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._settings = settings
        self._advantages = ADVANTAGES[settings.advantage]
        self._loss = partial(LOSSES[settings.loss], **settings.loss_config)
        self._kl = KL_ESTIMATORS[settings.kl_estimator]
        self._bounds = Bounds(low=settings.clip_low, high=settings.clip_high, dual=settings.clip_dual)
        self._weigh = CORRECTION_WEIGHTS[settings.correction.weights]
        self._keep = REJECTIONS[settings.correction.reject]
        self._decoupled = settings.correction.decoupled and not DECLARED[settings.loss].against_behaviour

    @property
    def needs_reference(self) -> bool:
        return self._settings.kl_coefficient > 0

    @property
    def aggregation(self) -> str:
        return self._settings.aggregation

    def advantages(self, batch: Sequence[Sequence[ScoredEpisode]]) -> list[list[list[float]]]:
        if self._settings.kl_place == "reward" and self.needs_reference:
            batch = [[self._penalised(episode) for episode in group] for group in batch]
        return self._advantages(batch)

    def _penalised(self, episode: ScoredEpisode) -> ScoredEpisode:
        """The episode with R - coefficient * sum of KL(behaviour || reference) over its tokens as its reward."""
        ratios = torch.tensor(episode.log_ratios, dtype=torch.float64)
        penalty = float(self._kl(ratios, torch.zeros_like(ratios)).sum())
        return replace(episode, reward=episode.reward - self._settings.kl_coefficient * penalty)

    def loss(self, batch: TokenBatch) -> Tensor:
        losses = self._correction(batch) * self._loss(batch, self._old(batch), self._bounds)
        if batch.reference is not None and self._settings.kl_place == "loss":
            losses = losses + self._settings.kl_coefficient * self._kl(batch.logprobs, batch.reference)
        return (batch.weights * losses).sum()

    def _old(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities of the old policy. In bypass mode it is the behaviour policy: the ratio holds the whole
        correction, and no weight applies it again.
        """
        return batch.old if self._decoupled else batch.behaviour

    def _correction(self, batch: TokenBatch) -> Tensor:
        log_ratio, settings = batch.old - batch.behaviour, self._settings.correction
        mask = self._keep(log_ratio, batch.sequences, settings)
        return mask * self._weigh(log_ratio, batch.sequences, settings) if self._decoupled else mask

    def token_metrics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The share of clipped tokens, of tokens without weight, and the mean weight."""
        with torch.no_grad():
            weights = self._correction(batch)
            metrics = {
                "clip_fraction": clipped(self._settings.loss, batch, self._old(batch), self._bounds),
                "rejected": (weights == 0.0).to(weights.dtype),
                "correction_weight": weights,
            }
            if batch.reference is not None:
                metrics["kl_reference"] = self._kl(batch.logprobs, batch.reference)
            return metrics

    def accept(self, rewards: Sequence[float]) -> bool:
        return not self._settings.dynamic_sampling or not equal(rewards)


def make_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that the settings name: a composed one, or a user's class by import path with `config` as keyword
    arguments.

    Raises:
        UserInputError: The class cannot be imported or made, or its aggregation is unknown.
    """
    if ":" not in settings.name:
        return ComposedAlgorithm(settings)
    algorithm_class = load(settings.name, field="spec.algorithm.name")
    try:
        algorithm = cast("Algorithm", algorithm_class(**settings.config))
    except Exception as error:
        raise UserInputError(
            f"spec.algorithm.config: {settings.name} cannot be made with {sorted(settings.config)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if algorithm.aggregation not in AGGREGATIONS:
        raise UserInputError(
            f"spec.algorithm.name: {settings.name} has aggregation {algorithm.aggregation!r}; "
            f"use one of {', '.join(AGGREGATIONS)}"
        )
    return UserAlgorithm(settings.name, algorithm)


__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTION_WEIGHTS",
    "KL_ESTIMATORS",
    "LOSSES",
    "REJECTIONS",
    "Bounds",
    "ComposedAlgorithm",
    "make_algorithm",
]
