"""Judging runs by the plateau of their evaluations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._app.comparison.verdict import EvaluationCurve, judge
from kestrl._shared.spec.threshold import ThresholdSpec, parse_threshold
from kestrl.errors import UserInputError

PUBLISHED = {"value": 0.6, "setting": "one GPU, 20 steps", "source": "a paper"}


def spec(**fields: Any) -> ThresholdSpec:
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "Threshold",
        "metadata": {"name": "test"},
        "spec": {
            "job": "job.yaml",
            "metric": "reward",
            "threshold": 0.5,
            "template": "the model's own",
            "published": PUBLISHED,
            **fields,
        },
    }
    return parse_threshold(document).spec


def curve(*values: float, seed: int = 42, **facts: float) -> EvaluationCurve:
    points = [{"step": 5 * index, "reward": value, "episodes": 100.0, **facts} for index, value in enumerate(values)]
    return EvaluationCurve(run=f"run-{seed}", seed=seed, evaluations=points)


def test_the_mean_of_the_last_evaluations_is_judged() -> None:
    verdict = judge(spec(), [curve(0.1, 0.2, 0.4, 0.5, 0.6)])
    (seed,) = verdict.seeds
    assert (seed.before, seed.values) == (0.1, (0.4, 0.5, 0.6))
    assert seed.plateau == verdict.mean == pytest.approx(0.5)
    assert seed.fall == pytest.approx(-0.2)
    assert verdict.passed


def test_one_good_evaluation_is_no_plateau() -> None:
    verdict = judge(spec(), [curve(0.1, 0.2, 0.2, 0.2, 0.9)])
    assert not verdict.passed
    assert verdict.problems == ("the mean plateau of reward is 0.4333, below 0.5",)


def test_a_curve_on_its_way_down_fails_above_the_threshold() -> None:
    falling = curve(0.1, 0.9, 0.75, 0.6)
    assert judge(spec(), [falling]).passed
    verdict = judge(spec(plateau={"evaluations": 3, "maxFall": 0.1}), [falling])
    assert verdict.problems == ("run-42: reward falls by 0.3000 over the plateau, more than 0.1",)


def test_the_mean_of_the_seeds_is_compared() -> None:
    lucky, unlucky = curve(0.1, 0.7, 0.7, 0.7, seed=1), curve(0.1, 0.4, 0.4, 0.4, seed=2)
    assert judge(spec(), [lucky, unlucky]).mean == pytest.approx(0.55)
    assert judge(spec(), [lucky, unlucky]).passed
    assert not judge(spec(), [unlucky]).passed


def test_a_rise_is_asked_of_every_seed() -> None:
    risen, flat = curve(0.1, 0.9, 0.9, 0.9, seed=1), curve(0.5, 0.6, 0.6, 0.6, seed=2)
    verdict = judge(spec(minRise=0.2), [risen, flat])
    assert verdict.problems == ("run-2: reward rose by 0.1000, and must rise by 0.2",)


def test_a_rise_needs_an_evaluation_before() -> None:
    points = curve(0.1, 0.9, 0.9, 0.9).evaluations[1:]
    verdict = judge(spec(minRise=0.2), [EvaluationCurve(run="run", seed=1, evaluations=points)])
    assert verdict.problems == ("run: reward was not evaluated before training, and must rise by 0.2",)


def test_failed_episodes_are_not_averaged_away() -> None:
    verdict = judge(spec(plateau={"evaluations": 1}), [curve(0.1, 0.9, exceptions=2.0)])
    assert verdict.problems == ("run-42: step 5: 2.0% of the episodes failed, more than 1.0%",)
    assert judge(spec(plateau={"evaluations": 1}, maxFailed=0.02), [curve(0.1, 0.9, exceptions=2.0)]).passed


def test_too_few_evaluations_are_an_error_of_the_file() -> None:
    with pytest.raises(UserInputError, match=r"spec.plateau.evaluations: run-42 has 2 evaluations after a step, not 3"):
        judge(spec(), [curve(0.1, 0.9, 0.9)])


def test_an_unknown_metric_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UserInputError, match=r"spec.metric: run-42 has no 'rewrad' .*\(there are: episodes, reward\)"):
        judge(spec(metric="rewrad"), [curve(0.1, 0.9, 0.9, 0.9)])


@given(st.lists(st.floats(0, 1), min_size=3, max_size=8), st.floats(-1, 1))
def test_a_shift_of_the_curve_shifts_the_plateau_and_not_the_fall(values: list[float], shift: float) -> None:
    (one,), (other,) = (judge(spec(), [curve(0, *each)]).seeds for each in (values, [v + shift for v in values]))
    assert other.plateau == pytest.approx(one.plateau + shift, abs=1e-9)
    assert other.fall == pytest.approx(one.fall, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": ""}, "spec.metric"),
        ({"seeds": []}, "spec.seeds"),
        ({"seeds": [1, 1]}, "spec.seeds: holds a seed twice"),
        ({"plateau": {"evaluations": 0}}, "spec.plateau.evaluations"),
        ({"published": {"value": 1.0}}, "spec.published.setting"),
        ({"treshold": 1}, "spec.treshold"),
    ],
)
def test_a_bad_file_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError) as refused:
        spec(**fields)
    assert message in str(refused.value)
