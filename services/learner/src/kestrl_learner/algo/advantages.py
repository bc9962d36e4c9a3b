"""Advantage estimators: from the rewards of a group to one number an episode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

TOLERANCE = 1e-8
"""Rewards that differ by less than this are equal: dividing by a standard deviation of rounding errors would make noise of size 1."""
EPSILON = 1e-6


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def grpo(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6), population standard deviation; 0 for a group of one or of equal rewards.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 10; the singleton rule is ART's, since verl's (A = R) turns a group that failures
    shrank to one into raw reward.
    """
    centred = dr_grpo(rewards)
    # math.hypot scales before it squares, so that large finite rewards do not overflow.
    deviation = math.hypot(*centred) / math.sqrt(len(centred)) if centred else 0.0
    return [value / (deviation + EPSILON) for value in centred]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """R - mean; 0 for a group of one or of equal rewards. Source: Understanding R1-Zero-like training (arXiv 2503.20783)."""
    if len(rewards) < 2 or max(rewards) - min(rewards) <= TOLERANCE:
        return [0.0] * len(rewards)
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """R minus the mean of the others = G / (G - 1) (R - mean); 0 for a group of one. Source: arXiv 2402.14740."""
    count = len(rewards)
    return [count / max(1, count - 1) * value for value in dr_grpo(rewards)]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
