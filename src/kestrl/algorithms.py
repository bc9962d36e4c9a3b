"""The protocol of a training algorithm: advantages over a batch, a loss over sampled tokens, a filter of groups.

The learner is blind to which algorithm runs. Built-in ones are named by `spec.algorithm.name`; a class by import path
takes part in the same way. `kestrl.testing.algorithms` is the conformance suite for either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """One part of an episode's reward: a rule, a judge or the agent loop's own."""

    value: float
    """Before weighting, the rewards of its turns included."""
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """What an advantage estimator sees of one episode."""

    reward: float
    """The total reward, those of its turns included."""
    turns: Sequence[int]
    """Sampled tokens of each turn, in the order of the episode's rows."""
    turn_rewards: Sequence[float] = ()
    """Reward of each turn, in the order of `turns`; empty if turns are not scored."""
    log_ratios: Sequence[float] = ()
    """log(behaviour / reference) of each sampled token; empty unless the algorithm needs the reference."""
    components: Mapping[str, RewardComponent] = field(default_factory=dict[str, RewardComponent])
    """The parts whose weighted sum is `reward`, by name; empty where only the total is known."""

    @property
    def tokens(self) -> int:
        """Sampled tokens of the episode."""
        return sum(self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole batch of an optimiser step: every micro-batch of every rank."""

    tokens: int
    """Sampled tokens."""
    sequences: int
    """Episodes with at least one sampled token."""
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The sampled tokens of one micro-batch. Every tensor is one-dimensional, (N,), in the same order.

    All sampled tokens of an episode are in the same micro-batch, also where its context was rewritten and it has
    several rows.
    """

    logprobs: Tensor
    """Log-probabilities under the current weights, with gradient."""
    behaviour: Tensor
    """Log-probabilities that the engine reported when it sampled the tokens."""
    old: Tensor
    """Log-probabilities under the weights that the step began with, without gradient. In a step of one update they are
    those of `logprobs`."""
    reference: Tensor | None
    """Log-probabilities under the base model without the adapter; None unless the algorithm needs them."""
    advantages: Tensor
    weights: Tensor
    """Aggregation weights. Summing weighted token losses over all micro-batches gives the aggregated loss of the
    step."""
    sequences: Tensor
    """int64: the episode of each token, numbered from 0 within the micro-batch."""
    groups: Tensor
    """int64: the group of each token, numbered from 0 within the micro-batch."""
    totals: Totals


class Algorithm(Protocol):
    """Turns scored groups into a gradient. Instances hold no state between steps."""

    @property
    def needs_reference(self) -> bool:
        """Whether `TokenBatch.reference` and `ScoredEpisode.log_ratios` are filled, by one more forward pass over the
        batch.
        """
        ...

    @property
    def aggregation(self) -> str:
        """Name of the aggregation that `TokenBatch.weights` follow, such as `token_mean`."""
        ...

    def advantages(self, batch: Sequence[Sequence[ScoredEpisode]]) -> Sequence[Sequence[Sequence[float]]]:
        """Advantages of every sampled token of the whole batch.

        Args:
            batch: Groups of episodes; each episode has a finite reward.

        Returns:
            For each group and episode as many finite numbers as the episode has sampled tokens. A group whose numbers
            are all 0 is excluded from the gradient, unless `needs_reference`.
        """
        ...

    def loss(self, batch: TokenBatch) -> Tensor:
        """The micro-batch's part of the step's loss: a scalar, the sum of its weighted token losses."""
        ...

    def accept(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards takes part in training; a refused one is replaced by another
        scenario's.
        """
        ...


@runtime_checkable
class HasTokenMetrics(Protocol):
    """An algorithm with numbers of its own, logged with those of every step."""

    def token_metrics(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """Numbers by name, (N,) each, which are averaged over the tokens of the step's updates."""
        ...
