"""Advantage estimators: from the rewards of a batch of groups to one number a sampled token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice

from kestrl.algorithms import RewardComponent, ScoredEpisode

Rewards = Sequence[Sequence[float]]
"""By group and episode."""
Advantages = list[list[float]]
Batch = Sequence[Sequence[ScoredEpisode]]
"""By group."""
Estimator = Callable[[Batch], list[list[list[float]]]]
"""From a batch to the advantage of every sampled token, by group and episode."""

TOLERANCE = 1e-8
"""Rewards within this are equal: dividing by a standard deviation of rounding errors would amplify them to size 1."""
EPSILON = 1e-6


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(centred: Sequence[float]) -> float:
    """Population standard deviation of centred values; `math.hypot` scales before it squares, so that large values do
    not overflow.
    """
    return math.hypot(*centred) / math.sqrt(len(centred)) if centred else 0.0


def equal(rewards: Sequence[float]) -> bool:
    """Whether a group has nothing to compare: fewer than two episodes, or rewards within `TOLERANCE`."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= TOLERANCE


def _centred(rewards: Sequence[float]) -> list[float]:
    if equal(rewards):
        return [0.0] * len(rewards)
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


def grpo(batch: Rewards) -> Advantages:
    """(R - mean) / (std + 1e-6), population standard deviation; 0 for a group of one or of equal rewards.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 10; the singleton rule is ART's, since verl's (A = R) turns a group that
    failures shrank to one into raw reward.
    """
    groups = dr_grpo(batch)
    return [[value / (_deviation(centred) + EPSILON) for value in centred] for centred in groups]


def dr_grpo(batch: Rewards) -> Advantages:
    """R - mean; 0 for a group of one or of equal rewards. Source: Understanding R1-Zero-like training (arXiv
    2503.20783).
    """
    return [_centred(rewards) for rewards in batch]


def rloo(batch: Rewards) -> Advantages:
    """R minus the mean of the others = G / (G - 1) (R - mean); 0 for a group of one. Source: arXiv 2402.14740."""
    return [[len(group) / max(1, len(group) - 1) * value for value in group] for group in dr_grpo(batch)]


def reinforce_plus_plus(batch: Rewards) -> Advantages:
    """R - group mean, divided by the standard deviation over all episodes of the batch + 1e-6.

    The mean over the batch of group-centred rewards is 0, so whitening is the division alone. Source: REINFORCE++
    (arXiv 2501.03262), the variant with a group baseline.
    """
    centred = dr_grpo(batch)
    scale = _deviation([value for group in centred for value in group]) + EPSILON
    return [[value / scale for value in group] for group in centred]


def maxrl(batch: Rewards) -> Advantages:
    """(R - mean) / mean for rewards in [0, inf); 0 where the mean is not positive. Source: prime-rl's MaxRL."""
    return [
        [value / mean for value in centred]
        if (mean := _mean(rewards) if rewards else 0.0) > EPSILON
        else [0.0] * len(rewards)
        for rewards, centred in zip(batch, dr_grpo(batch), strict=True)
    ]


def token_advantages(estimator: Callable[[Rewards], Advantages], batch: Batch) -> list[list[list[float]]]:
    """The advantage of every sampled token, by group and episode.

    A token has the advantage of its episode's outcome, the reward without those of its turns, plus the advantages of
    its own and all later turns. Rewards of turns are compared with those of all turns of the group. Source:
    DeepSeekMath (arXiv 2402.03300) sections 4.1.2 (outcome) and 4.1.3 (process supervision); both, where both are
    given.
    """
    outcomes = estimator([[episode.reward - math.fsum(episode.turn_rewards) for episode in group] for group in batch])
    processes = estimator([_turn_rewards(group) for group in batch])
    return [
        [
            [
                own_advantage + turn_advantage
                for tokens, turn_advantage in zip(episode.turns, _remaining(episode, turns), strict=True)
                for _ in range(tokens)
            ]
            for episode, own_advantage in zip(group, outcome, strict=True)
        ]
        for group, outcome, process in zip(batch, outcomes, processes, strict=True)
        for turns in [iter(process)]
    ]


def _turn_rewards(group: Sequence[ScoredEpisode]) -> list[float]:
    """The rewards of all turns of a group. A single episode has nothing to be compared with."""
    return [reward for episode in group for reward in episode.turn_rewards] if len(group) > 1 else []


def _remaining(episode: ScoredEpisode, advantages: Iterator[float]) -> list[float]:
    """For each turn of an episode, the sum of the advantages of this and all later turns; takes its own from the
    group's.
    """
    of_episode = list(islice(advantages, len(episode.turn_rewards)))
    sums = list(accumulate(reversed(of_episode)))[::-1]
    return sums or [0.0] * len(episode.turns)


def gdpo(batch: Batch) -> list[list[list[float]]]:
    """Sum over components of weight (r - mean) / (std + 1e-6), divided by the standard deviation of these sums over all
    episodes of the batch + 1e-6; the same for every token of an episode.

    Each component is compared within its group by itself, so that one with a small range counts as much as its weight
    says. The mean of the sums over the batch is 0, so whitening is the division alone. An episode whose components are
    not known has one, its total. Source: GDPO (arXiv 2601.05242).
    """
    sums = [_weighted_sum([_components(episode) for episode in group]) for group in batch]
    scale = _deviation([value for group in sums for value in group]) + EPSILON
    return [
        [[value / scale] * episode.tokens for episode, value in zip(group, values, strict=True)]
        for group, values in zip(batch, sums, strict=True)
    ]


def _components(episode: ScoredEpisode) -> Mapping[str, RewardComponent]:
    return episode.components or {"reward": RewardComponent(value=episode.reward, weight=1.0)}


def _weighted_sum(group: Sequence[Mapping[str, RewardComponent]]) -> list[float]:
    """For each episode of a group, the weighted sum of the advantages of its components."""
    weights = {name: component.weight for components in group for name, component in components.items()}
    sums = [0.0] * len(group)
    for name, weight in weights.items():
        values = [components[name].value if name in components else 0.0 for components in group]
        sums = [total + weight * value for total, value in zip(sums, grpo([values])[0], strict=True)]
    return sums


OF_REWARDS: dict[str, Callable[[Rewards], Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "maxrl": maxrl,
}
"""Estimators that compare one number an episode, or one a turn."""

ADVANTAGES: dict[str, Estimator] = {name: partial(token_advantages, each) for name, each in OF_REWARDS.items()} | {
    "gdpo": gdpo
}
"""The advantage of every sampled token, by group and episode."""
