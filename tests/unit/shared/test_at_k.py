"""Estimates over several samples, against enumerations of every subset and of every choice among equals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.at_k import at_k, majority, unbiased_best, unbiased_pass
from kestrl.episode import Group
from kestrl.errors import EngineFailure
from kestrl.testing.attempts import make_attempt

VALUES = st.lists(st.sampled_from([-1.0, -0.6, 0.0, 0.5, 1.0]), min_size=1, max_size=7)


@given(VALUES, st.data())
def test_pass_and_best_are_means_over_every_subset(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    subsets = [*combinations(values, k)]
    best = sum(Fraction(max(subset)) for subset in subsets) / len(subsets)
    assert unbiased_best(values, k) == pytest.approx(float(best), abs=1e-12)
    passed = Fraction(sum(any(value == 1 for value in subset) for subset in subsets), len(subsets))
    assert unbiased_pass(len(values), values.count(1.0), k) == pytest.approx(float(passed), abs=1e-12)


def test_many_samples_do_not_overflow() -> None:
    assert unbiased_pass(1024, 1, 512) == pytest.approx(0.5)
    assert unbiased_best([0.0] * 1023 + [1.0], 512) == pytest.approx(0.5)


@given(st.lists(st.sampled_from(["", "1", "2", "3"]), min_size=1, max_size=8))
def test_the_majority_is_a_mean_over_every_choice_among_equals(answers: list[str]) -> None:
    """Every order in which a vote could break ties; "2" is the correct answer."""
    votes = [(answer, float(answer == "2")) for answer in answers]
    most = max(answers.count(answer) for answer in answers)
    chosen = [answer for answer in answers if answers.count(answer) == most]
    assert majority(votes) == pytest.approx(chosen.count("2") / len(chosen), abs=1e-12)


def test_equal_answers_that_were_judged_differently_count_with_their_mean() -> None:
    assert majority([("a", 1.0), ("a", 0.0), ("b", 1.0)]) == 0.5


def question(ordinal: int, *samples: tuple[float, str | None] | None) -> list[Group]:
    """A group for each sample: correctness and answer, or None for one that failed."""
    groups: list[Group] = []
    for sample in samples:
        attempt = make_attempt("x")
        episode = replace(attempt.episode, failure=EngineFailure("gone").failure())
        if sample is not None:
            correct, answer = sample
            metrics = {"answer_correct": correct}
            episode = replace(attempt.episode, reward=2 * correct - 1, metrics=metrics, answer=answer)
        groups.append(Group(id="g", scenario=replace(attempt.scenario, ordinal=ordinal), episodes=(episode,)))
    return groups


def test_estimates_are_means_over_questions() -> None:
    groups = question(0, (1, "a"), (1, "a"), (0, "b"), (0, "")) + question(1, (0, "c"), (0, "c"), (0, "d"), (1, "e"))
    assert at_k(groups, 4) == pytest.approx(
        {
            "mean@4": (0.5 + 0.25) / 2,
            "maj@4": (1 + 0) / 2,
            "pass@2": ((1 - 1 / 6) + 0.5) / 2,
            "best@2": ((1 - 1 / 6) + 0.5) - 1,
            "pass@4": 1.0,
            "best@4": 1.0,
        }
    )


def names(groups: Sequence[Group], samples: int) -> set[str]:
    return set(at_k(groups, samples))


def test_what_cannot_be_estimated_is_missing_and_never_zero() -> None:
    whole = question(0, (1, None), (0, None))
    assert names(whole, 1) == set()
    assert names(whole, 2) == {"mean@2", "pass@2", "best@2"}, "no reward reads answers"
    failed = at_k(question(0, (1, "a"), (1, "a"), None) + question(1, None, None, None), 3)
    assert failed == {"pass@2": 1.0, "best@2": 1.0, "incomplete_questions": 1.0}
    unjudged = [replace(group, episodes=[replace(group.episodes[0], metrics={})]) for group in whole]
    assert names(unjudged, 2) == {"best@2"}, "no reward reports answer_correct"


def test_sizes_are_powers_of_two_and_the_number_of_samples() -> None:
    groups = question(0, *[(1.0, "a")] * 30)
    assert {name for name in at_k(groups, 30) if name.startswith("pass")} == {f"pass@{k}" for k in (2, 4, 8, 16, 30)}
    assert names(groups[:8], 8) >= {"mean@8", "maj@8", "pass@8", "pass@4", "best@2"}
