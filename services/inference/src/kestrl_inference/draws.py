"""Decides whether an engine samples from the distribution that it scores with, which the probe has compared with the
learner's. Pure.

An engine reports a log-prob with each token. Where it is not the one that scoring gives, something changes both
(another temperature, a penalty). Where it is, the sampler may still choose other tokens than it reports; then their
frequencies are wrong. Exploring draws choose the tokens to count, and independent draws are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FALSE_ALARM = 1e-6
"""Largest probability with which an engine that samples correctly is refused, at each of its starts."""
ROUNDING = 1e-3
"""Log-prob difference in nats that is always allowed between sampling and scoring."""
CLOSE = 2.0
"""Factor of the largest difference that was seen, within which those of other tokens are expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploringDraw:
    """A sampled turn and what scoring says of it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Reported by sampling."""
    scores: Sequence[float]
    """Log-probs of the same tokens, by scoring."""

    @property
    def gap(self) -> float:
        return max((abs(a - b) for a, b in zip(self.logprobs, self.scores, strict=True)), default=0.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a probability."""

    low: float
    high: float

    def complement(self) -> Interval:
        return Interval(1.0 - self.high, 1.0 - self.low)


def fault(exploring: Sequence[ExploringDraw], counted: Sequence[int], bound: float) -> str:
    """What contradicts sampling from the scored distribution; empty if nothing does.

    Args:
        exploring: Draws that were scored.
        counted: First tokens of independent draws after the same prompt.
        bound: Largest accepted difference of log-probs in nats.
    """
    gap = max(draw.gap for draw in exploring)
    if gap > bound:
        return f"its log-probs of sampling and of scoring differ by {gap:.3g} nats (bound {bound:.3g})"
    scored = {draw.token_ids[0]: draw.scores[0] for draw in exploring}
    slack = min(bound, CLOSE * gap + ROUNDING)
    return _miscount(scored, counted, slack)


def _miscount(scored: Mapping[int, float], counted: Sequence[int], slack: float) -> str:
    """The tokens that were drawn too often or too seldom: single ones, and the most probable ones together.

    Each count is binomial. The probability that any of them is beyond its tails is at most the sum of the tails, so
    each gets an equal share of `FALSE_ALARM`.
    """
    ranked = sorted(scored, key=lambda token: -scored[token])
    nested = [tuple(ranked[:size]) for size in range(2, len(ranked) + 1)]
    groups = [*((token,) for token in ranked), *nested]
    masses = {token: math.exp(scored[token]) for token in ranked}
    tail = FALSE_ALARM / (2 * len(groups))
    for group in groups:
        mass = sum(masses[token] for token in group)
        expected = _widened(mass, slack)
        count = sum(token in group for token in counted)
        if _upper_tail(count, len(counted), expected.high) < tail:
            return _described(group, "more", count, len(counted), mass)
        if _upper_tail(len(counted) - count, len(counted), expected.complement().high) < tail:
            return _described(group, "less", count, len(counted), mass)
    return ""


def _widened(mass: float, slack: float) -> Interval:
    """Probability of tokens whose log-probs are known up to some slack."""
    return Interval(max(0.0, mass * math.exp(-slack)), min(1.0, mass * math.exp(slack)))


def _described(group: Sequence[int], word: str, count: int, draws: int, mass: float) -> str:
    tokens = f"token {group[0]}" if len(group) == 1 else f"the {len(group)} most probable tokens of those seen"
    return (
        f"it drew {tokens} {word} often than it says: {count} of {draws} times at a probability of {min(mass, 1.0):.3g}"
    )


def _upper_tail(count: int, draws: int, probability: float) -> float:
    """Probability of at least so many successes in independent draws."""
    if count <= 0 or probability >= 1.0:
        return 1.0
    if probability <= 0.0:
        return 0.0
    log_p, log_q = math.log(probability), math.log1p(-probability)
    terms = [
        math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1) + k * log_p + (draws - k) * log_q
        for k in range(count, draws + 1)
    ]
    return math.fsum(math.exp(term) for term in terms)
