"""A user's algorithm behind typed failures: what it raises or returns wrongly is a failure of user code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from kestrl.algorithms import Algorithm, HasTokenMetrics, ScoredEpisode, TokenBatch
from kestrl.errors import UserCodeError, described

Result = TypeVar("Result")


class UserAlgorithm:
    """Delegates to an algorithm by import path and checks what it returns.

    Args:
        name: The import path, for messages.
        algorithm: An instance of the class.
    """

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self._name, self._algorithm = name, algorithm

    @property
    def needs_reference(self) -> bool:
        return self._algorithm.needs_reference

    @property
    def aggregation(self) -> str:
        return self._algorithm.aggregation

    def advantages(self, batch: Sequence[Sequence[ScoredEpisode]]) -> Sequence[Sequence[Sequence[float]]]:
        """Advantages of every sampled token; raises UserCodeError if their number or a value is invalid."""
        token_advantages = self._call("advantages", lambda: self._algorithm.advantages(batch))
        expected = [[episode.tokens for episode in group] for group in batch]
        sizes = self._call("advantages", lambda: [[len(values) for values in group] for group in token_advantages])
        if sizes != expected:
            raise UserCodeError(
                f"{self._name}.advantages must return one number for each sampled token of each episode: "
                f"{expected}, not {sizes}",
                code="advantages_invalid",
            )
        if not all(math.isfinite(value) for group in token_advantages for values in group for value in values):
            raise UserCodeError(
                f"{self._name}.advantages returned a number that is not finite", code="advantages_invalid"
            )
        return token_advantages

    def loss(self, batch: TokenBatch) -> Tensor:
        return self._call("loss", lambda: self._algorithm.loss(batch))

    def token_metrics(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """The class's own numbers, if it has any."""
        algorithm = self._algorithm
        if not isinstance(algorithm, HasTokenMetrics):
            return {}
        return self._call("token_metrics", lambda: dict(algorithm.token_metrics(batch)))

    def accept(self, rewards: Sequence[float]) -> bool:
        return self._call("accept", lambda: bool(self._algorithm.accept(rewards)))

    def _call(self, method: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:
            message = f"spec.algorithm.name: {self._name}.{method} raised {described(error)}"
            raise UserCodeError(message, code="algorithm_raised") from error
