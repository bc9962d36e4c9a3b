"""Standard errors and the paired test of evaluations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kestrl._app.local.comparison import PolicyEvaluation, as_json, remarks, table
from kestrl._app.local.uncertainty import different_questions, paired, pairs_of, standard_error, values_of
from kestrl.episode import Failure, Group
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.testing.attempts import make_attempt

FAILED = Failure(boundary="engine", code="lost", message="gone", retryable=True)


def groups(rewards: Mapping[int, Sequence[float | None]]) -> list[Group]:
    """One group a sample; None is a failed episode."""
    made: list[Group] = []
    for ordinal, samples in rewards.items():
        for reward in samples:
            attempt = make_attempt("x")
            scored = replace(attempt.episode, reward=reward, metrics={"answer_correct": float(reward or 0)})
            episode = replace(scored, failure=FAILED) if reward is None else scored
            made.append(Group(id="g", scenario=replace(attempt.scenario, ordinal=ordinal), episodes=(episode,)))
    return made


def test_a_question_counts_once_however_many_samples_it_has() -> None:
    """Eight samples of a question are not eight questions: the error does not shrink by repeating."""
    once = values_of(groups({0: [1.0], 1: [0.0], 2: [1.0]}))["reward"]
    repeated = values_of(groups({0: [1.0] * 8, 1: [0.0] * 8, 2: [1.0] * 8}), 8)
    assert standard_error(once) == standard_error(repeated["reward"]) == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    assert repeated["mean@8"] == repeated["answer_correct"] == once
    assert standard_error({0: 1.0}) is None


def enumerated(differences: Sequence[float]) -> float:
    observed = abs(sum(differences))
    flips = [*itertools.product((-1, 1), repeat=len(differences))]
    sums = [abs(sum(sign * each for sign, each in zip(signs, differences, strict=True))) for signs in flips]
    return sum(each >= observed - 1e-9 for each in sums) / len(flips)


@given(st.lists(st.sampled_from((-1.0, -0.5, 0.0, 0.25, 1.0)), min_size=1, max_size=9))
def test_the_p_value_is_that_of_all_flips(differences: list[float]) -> None:
    pair = paired(dict.fromkeys(range(len(differences)), 0.0), dict(enumerate(differences)))
    assert pair is not None
    assert pair.p == pytest.approx(enumerated(differences))


def test_many_different_sums_are_approximated() -> None:
    differences = {each: math.sin(each) + 0.4 for each in range(60)}
    pair = paired(dict.fromkeys(differences, 0.0), differences)
    assert pair is not None
    z = sum(differences.values()) / math.sqrt(sum(each**2 for each in differences.values()))
    assert pair.p == pytest.approx(2 * (1 - NormalDist().cdf(z)), rel=1e-6)
    assert 0 < pair.p < 0.01


def test_questions_of_one_policy_alone_are_said_and_not_compared() -> None:
    before = values_of(groups({0: [1.0], 1: [0.0], 2: [None], 3: [0.0]}))
    after = values_of(groups({0: [1.0], 1: [None], 2: [1.0], 3: [1.0]}))
    pairs = pairs_of(before, after, ("reward", "mean@4"))
    assert list(pairs) == ["reward"]
    pair = pairs["reward"]
    assert (pair.questions, pair.difference, pair.p, pair.only_first, pair.only_second) == (2, 0.5, 1.0, 1, 1)
    (line,) = different_questions(pairs, "before", "after")
    assert "1 only by before, 1 only by after; their means are not over the same ones" in line
    assert not [*different_questions(pairs_of(before, before, ("reward",)), "a", "b")]


def test_a_comparison_shows_errors_and_the_difference() -> None:
    def evaluation(label: str, rewards: Mapping[int, Sequence[float | None]]) -> PolicyEvaluation:
        made = groups(rewards)
        mean = sum(episode.reward or 0 for group in made for episode in group.episodes) / len(made)
        sampling = EvaluationSampling(samples=2, temperature=1.0)
        folder = Path("folder")
        return PolicyEvaluation(
            label=label, policy=label, means={"reward": mean}, groups=made, folder=folder, sampling=sampling
        )

    base = evaluation("base", {each: [0.0, each % 2] for each in range(12)})
    better = evaluation("v5", {each: [1.0, 1.0] for each in range(12)})
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table([base, better]))
    assert "0.250 ±0.075" in captured.get()
    assert [*remarks([base, better])] == [
        "v5 against base: reward +0.750 ±0.075 over 12 questions that both answered, p < 0.001",
        "v5 against base: answer_correct +0.750 ±0.075 over 12 questions that both answered, p < 0.001",
    ]
    kept = as_json(base)
    assert kept["standard_errors"]["reward"] == pytest.approx(0.0753, abs=1e-4)
    assert kept["against_first"] == {}
