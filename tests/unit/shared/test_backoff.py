"""Pauses between attempts: what holds for all figures."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrl._shared.backoff import Backoff

AT_ANY_LOAD = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SECONDS = st.floats(0, 1e6, allow_nan=False)
BACKOFFS = st.builds(
    lambda first, further, factor, jitter: Backoff(first, first + further, factor, jitter),
    SECONDS,
    SECONDS,
    st.floats(1, 100),
    st.floats(0, 1),
)


def test_pauses_double_up_to_the_limit() -> None:
    assert [Backoff(0.5, 5).pause(failures) for failures in range(7)] == [0, 0.5, 1, 2, 4, 5, 5]


def test_a_factor_of_its_own_replaces_doubling() -> None:
    assert [Backoff(1, 50, factor=3).pause(failures) for failures in (1, 2, 3, 4, 5)] == [1, 3, 9, 27, 50]


@AT_ANY_LOAD
@given(BACKOFFS, st.integers(1, 2000))
def test_a_pause_is_never_shorter_than_the_one_before_nor_longer_than_the_limit(
    backoff: Backoff, failures: int
) -> None:
    before, after = backoff.pause(failures), backoff.pause(failures + 1)
    assert backoff.first <= before <= after <= backoff.limit
    if after < backoff.limit:
        assert after == pytest.approx(before * backoff.factor)


@AT_ANY_LOAD
@given(BACKOFFS.filter(lambda backoff: backoff.first > 0 and backoff.factor > 1.1))
def test_any_number_of_failures_has_a_pause(backoff: Backoff) -> None:
    assert backoff.pause(10**9) == backoff.limit


@AT_ANY_LOAD
@given(BACKOFFS, st.integers(0, 50), st.integers())
def test_chance_takes_at_most_the_share(backoff: Backoff, failures: int, seed: int) -> None:
    longest, pause = backoff.pause(failures), backoff.jittered(failures, Random(seed))
    assert longest * (1 - backoff.jitter) <= pause <= longest
    assert pause == backoff.jittered(failures, Random(seed)), "the source alone decides"


def test_chance_spreads_those_that_failed_together() -> None:
    chance = Random(7)
    pauses = [Backoff(4, 4, jitter=0.5).jittered(1, chance) for _ in range(200)]
    assert min(pauses) < 2.1
    assert max(pauses) > 3.9
    assert all(one != other for one, other in pairwise(pauses))


@pytest.mark.parametrize(
    "figures",
    [
        (-1, 5),
        (6, 5),
        (1, math.inf),
        (math.nan, 5),
        (1, 5, 0.5),
        (1, 5, math.inf),
        (1, 5, 2, -0.1),
        (1, 5, 2, 1.1),
    ],
)
def test_figures_that_do_not_grow_up_to_a_limit_are_refused(figures: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="needs 0 <= first <= limit"):
        Backoff(*figures)
