"""Whether an engine samples from the distribution that it scores with: the decision, without an engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from kestrl_inference.draws import FALSE_ALARM, ExploringDraw, fault

BOUND = 1e-2
DRAWS = 512
SHARES = {token: 0.8**token for token in range(40)}
PROBABILITIES = {token: share / sum(SHARES.values()) for token, share in SHARES.items()}


def drawn(count: int, seed: int, *, sharpened: float = 1.0, without: frozenset[int] = frozenset()) -> list[int]:
    """Tokens of a sampler that may be another one than it says."""
    weights = [0.0 if token in without else share**sharpened for token, share in PROBABILITIES.items()]
    return random.Random(seed).choices(list(PROBABILITIES), weights, k=count)


def explored(tokens: Sequence[int], *, noise: float = 0.0, seed: int = 1) -> list[ExploringDraw]:
    """Draws with their log-probs, which differ from the scores by up to some noise."""
    source = random.Random(seed)
    return [
        ExploringDraw(
            token_ids=[token],
            logprobs=[math.log(PROBABILITIES[token]) + source.uniform(-noise, noise)],
            scores=[math.log(PROBABILITIES[token])],
        )
        for token in tokens
    ]


@pytest.mark.parametrize("noise", [0.0, 5e-3])
def test_an_engine_that_samples_what_it_scores_is_not_refused(noise: float) -> None:
    for seed in range(25):
        exploring = explored(drawn(32, seed), noise=noise, seed=seed)
        assert fault(exploring, drawn(DRAWS, 1000 + seed), BOUND) == ""


@pytest.mark.parametrize(
    ("skew", "what"),
    [
        ({"sharpened": 1.6}, "more often than it says"),
        ({"sharpened": 0.5}, "less often than it says"),
        ({"without": frozenset({0})}, "drew token 0 less often than it says: 0 of 512"),
    ],
    ids=["lower temperature", "higher temperature", "a token banned"],
)
def test_a_sampler_that_draws_other_tokens_than_it_reports_is_refused(
    skew: dict[str, float | frozenset[int]], what: str
) -> None:
    for seed in range(8):
        assert what in fault(explored(drawn(32, seed)), drawn(DRAWS, 1000 + seed, **skew), BOUND)  # pyright: ignore[reportArgumentType]


def test_log_probs_of_another_distribution_are_refused() -> None:
    one_off = explored([1, 2, 3])
    one_off[1] = ExploringDraw(token_ids=[2, 5], logprobs=[-1.0, -2.0], scores=[-1.0, -2.02])
    assert fault(one_off, drawn(DRAWS, 1), BOUND) == (
        "its log-probs of sampling and of scoring differ by 0.02 nats (bound 0.01)"
    )
    assert fault(one_off[:1], drawn(DRAWS, 1), BOUND) == ""


def test_what_was_never_explored_is_counted_together() -> None:
    """The tokens that were seen have all of the mass, and others are drawn."""
    certain = [ExploringDraw(token_ids=[7], logprobs=[0.0], scores=[0.0])]
    assert fault(certain, [7] * DRAWS, BOUND) == ""
    assert fault(certain, [7] * (DRAWS - 10) + [8] * 10, BOUND) == (
        "it drew token 7 less often than it says: 502 of 512 times at a probability of 1"
    )


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.5, 0.98])
def test_the_chance_of_a_false_alarm_is_bounded(probability: float) -> None:
    """By the binomial distribution itself: the counts that are refused have at most that probability together."""
    one = [ExploringDraw(token_ids=[7], logprobs=[math.log(probability)], scores=[math.log(probability)])]
    chances = [
        math.comb(DRAWS, count) * probability**count * (1 - probability) ** (DRAWS - count)
        for count in range(DRAWS + 1)
        if fault(one, [7] * count + [8] * (DRAWS - count), BOUND)
    ]
    assert chances
    assert sum(chances) <= FALSE_ALARM
