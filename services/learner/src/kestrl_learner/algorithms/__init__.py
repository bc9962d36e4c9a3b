"""Training algorithms: small pure functions with a registry entry each, and the algorithm that a job's settings compose
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from kestrl.algorithms import Algorithm, ScoredEpisode, TokenBatch
from kestrl.errors import UserInputError
from kestrl.importing import load
from kestrl.plan.settings import AlgorithmSettings
from kestrl_learner.algorithms.advantages import ADVANTAGES, equal, token_advantages
from kestrl_learner.algorithms.aggregation import AGGREGATIONS
from kestrl_learner.algorithms.kl import KL_ESTIMATORS
from kestrl_learner.algorithms.losses import LOSSES, Bounds
from kestrl_learner.algorithms.user import UserAlgorithm


class ComposedAlgorithm:
    """An advantage estimator, a loss, an aggregation and an optional KL term, each chosen by name."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._settings = settings
        self._advantages, self._loss = ADVANTAGES[settings.advantage], LOSSES[settings.loss]
        self._kl = KL_ESTIMATORS[settings.kl_estimator]
        self._bounds = Bounds(
            low=settings.clip_low,
            high=settings.clip_high,
            dual=settings.clip_dual,
            importance_cap=settings.importance_cap,
        )

    @property
    def needs_reference(self) -> bool:
        return self._settings.kl_coefficient > 0

    @property
    def aggregation(self) -> str:
        return self._settings.aggregation

    def advantages(self, batch: Sequence[Sequence[ScoredEpisode]]) -> list[list[list[float]]]:
        return token_advantages(self._advantages, batch)

    def loss(self, batch: TokenBatch) -> Tensor:
        losses = self._loss(batch, self._bounds)
        if batch.reference is not None:
            losses = losses + self._settings.kl_coefficient * self._kl(batch.logprobs, batch.reference)
        return (batch.weights * losses).sum()

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
    made = load(settings.name, field="spec.algorithm.name")
    try:
        algorithm = cast("Algorithm", made(**settings.config))
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


__all__ = ["ADVANTAGES", "AGGREGATIONS", "KL_ESTIMATORS", "LOSSES", "Bounds", "ComposedAlgorithm", "make_algorithm"]
