"""Conformance suite of training algorithms: properties of every `kestrl.algorithms.Algorithm`.

A user's test calls `check_algorithm(MyAlgorithm())`; torch is imported when it runs. It raises AssertionError with the
property that does not hold.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kestrl.algorithms import Algorithm, ScoredEpisode, TokenBatch, Totals

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-9
Weigh = Callable[[int, Totals], float]
"""(sampled tokens of an episode, totals of the batch) -> weight of each of its tokens."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Log-probabilities of the sampled tokens of one episode."""

    logprobs: list[float]
    behaviour: list[float]
    old: list[float]
    reference: list[float]


def check_algorithm(algorithm: Algorithm, *, seed: int = 0) -> None:
    """Checks an algorithm on generated batches.

    Args:
        algorithm: Made as a job would make it.
        seed: Seed of the generated batches.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    chance = random.Random(seed)  # noqa: S311 - test data
    batch = [[_episode(chance) for _ in range(4)] for _ in range(3)]
    _check_advantages(algorithm, batch)
    _check_nothing_to_compare(algorithm)
    _check_order(algorithm, batch, chance)
    _check_loss(algorithm, batch, chance)


def _episode(chance: random.Random) -> ScoredEpisode:
    turns = [chance.randrange(1, 5) for _ in range(chance.randrange(1, 4))]
    return ScoredEpisode(reward=chance.choice([0.0, 0.25, 1.0]) + chance.random() * 1e-3, turns=turns)


def _check_advantages(algorithm: Algorithm, batch: Sequence[Sequence[ScoredEpisode]]) -> None:
    advantages = algorithm.advantages(batch)
    sizes = [[len(values) for values in group] for group in advantages]
    expected = [[episode.tokens for episode in group] for group in batch]
    assert sizes == expected, f"an advantage for each sampled token of each episode: {expected}, not {sizes}"
    finite = all(math.isfinite(value) for group in advantages for values in group for value in values)
    assert finite, "advantages are finite"
    assert algorithm.advantages(batch) == advantages, "advantages are a function of the batch alone"


def _check_nothing_to_compare(algorithm: Algorithm) -> None:
    equal = [[ScoredEpisode(reward=0.1 + 0.2, turns=[3]), ScoredEpisode(reward=0.3, turns=[2, 1])]]
    single = [[ScoredEpisode(reward=5.0, turns=[4])]]
    for name, batch in (("equal rewards", equal), ("a group of one", single)):
        values = [value for group in algorithm.advantages(batch) for episode in group for value in episode]
        assert not any(values), f"{name} have no advantage, not {values}"


def _check_order(algorithm: Algorithm, batch: Sequence[Sequence[ScoredEpisode]], chance: random.Random) -> None:
    order = list(range(len(batch)))
    chance.shuffle(order)
    straight, shuffled = algorithm.advantages(batch), algorithm.advantages([batch[number] for number in order])
    for place, number in enumerate(order):
        same = all(
            abs(one - other) <= TOLERANCE
            for left, right in zip(straight[number], shuffled[place], strict=True)
            for one, other in zip(left, right, strict=True)
        )
        assert same, "the order of groups does not change advantages"


def _tokens(episode: ScoredEpisode, chance: random.Random) -> _Tokens:
    logprobs = [-chance.random() * 5 - 0.01 for _ in range(episode.tokens)]
    behaviour = [value + chance.uniform(-0.3, 0.3) for value in logprobs]
    old = [value + chance.uniform(-0.3, 0.3) for value in logprobs]
    reference = [value + chance.uniform(-0.3, 0.3) for value in logprobs]
    return _Tokens(logprobs, behaviour, old, reference)


def _check_loss(algorithm: Algorithm, batch: Sequence[Sequence[ScoredEpisode]], chance: random.Random) -> None:
    streams = [[_tokens(episode, chance) for episode in group] for group in batch]
    advantages = algorithm.advantages(batch)
    unsplit = list(_micro_batches(algorithm, streams, advantages, split=False))
    parts = list(_micro_batches(algorithm, streams, advantages, split=True))
    (loss, gradient), (split_loss, split_gradient) = _summed(algorithm, unsplit), _summed(algorithm, parts)
    assert abs(loss - split_loss) <= TOLERANCE, "micro-batches do not change the loss"
    assert all(abs(one - other) <= TOLERANCE for one, other in zip(gradient, split_gradient, strict=True)), (
        "micro-batches do not change the gradient"
    )
    without = [
        replace(micro_batch, advantages=micro_batch.advantages * 0, weights=micro_batch.weights * 0)
        for micro_batch in unsplit
    ]
    assert _summed(algorithm, without)[0] == 0.0, "tokens of weight 0 have no part in the loss"


def _micro_batches(
    algorithm: Algorithm,
    streams: Sequence[Sequence[_Tokens]],
    advantages: Sequence[Sequence[Sequence[float]]],
    *,
    split: bool,
) -> Iterator[TokenBatch]:
    """The batch by group, or by episode where `split`."""
    import torch

    counts = [len(tokens.logprobs) for group in streams for tokens in group]
    totals = Totals(tokens=sum(counts), sequences=len(counts), groups=len(streams))

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    for group, values in zip(streams, advantages, strict=True):
        pairs = list(zip(group, values, strict=True))
        for part in [[pair] for pair in pairs] if split else [pairs]:
            sizes = [len(tokens.logprobs) for tokens, _ in part]
            size = sum(sizes)
            yield TokenBatch(
                logprobs=tensor([value for tokens, _ in part for value in tokens.logprobs]),
                behaviour=tensor([value for tokens, _ in part for value in tokens.behaviour]),
                old=tensor([value for tokens, _ in part for value in tokens.old]),
                reference=tensor([value for tokens, _ in part for value in tokens.reference])
                if algorithm.needs_reference
                else None,
                advantages=tensor([value for _, episode_advantages in part for value in episode_advantages]),
                weights=torch.full((size,), 1.0 / totals.tokens, dtype=torch.float64),
                sequences=torch.tensor([place for place, count in enumerate(sizes) for _ in range(count)]),
                groups=torch.zeros(size, dtype=torch.long),
                totals=totals,
            )


def _summed(algorithm: Algorithm, batches: Sequence[TokenBatch]) -> tuple[float, list[float]]:
    """Loss of all micro-batches, and its gradient for every token's log-probability."""
    loss, gradient = 0.0, list[float]()
    for batch in batches:
        logprobs = batch.logprobs.detach().clone().requires_grad_()
        value = algorithm.loss(replace(batch, logprobs=logprobs))
        assert value.ndim == 0, "a loss is a scalar"
        value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        assert logprobs.grad is not None, "a loss has a gradient"
        loss += float(value.detach())
        gradient += [float(part) for part in logprobs.grad]
    return loss, gradient
