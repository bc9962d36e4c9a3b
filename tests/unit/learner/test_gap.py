"""The log-prob gap: its numbers, whose engine they are, and when they stop a run."""

from __future__ import annotations

import math

import pytest
import torch

from kestrl.plan.planning import gap_bounds
from kestrl_learner.gap import Drift, measure, merged
from kestrl_learner.metrics import told_gap

BOUNDS = gap_bounds(1e-3)


def test_the_gap_is_told_in_numbers_one_can_check_by_hand() -> None:
    differences = torch.tensor([0.0] * 98 + [0.1, -0.4])
    fresh = torch.tensor([True] * 99 + [False])
    gap = measure([differences], [fresh], [["engine-0"] * 100])
    assert (gap.all.tokens, gap.own.tokens) == (100, 99)
    assert gap.all.mean == pytest.approx(0.005)
    assert gap.all.max == pytest.approx(0.4)
    assert gap.all.p99 == pytest.approx(0.1)
    assert gap.own.mean == pytest.approx(0.1 / 99)
    weights = [math.exp(value) for value in differences]
    assert gap.all.ess == pytest.approx(sum(weights) ** 2 / (100 * sum(weight**2 for weight in weights)), rel=1e-5)


def test_every_engine_is_told_by_its_own_tokens_of_the_newest_policy() -> None:
    parts = [torch.tensor([0.0, 0.2]), torch.tensor([0.0, 0.4, 0.0])]
    fresh = [torch.tensor([True, True]), torch.tensor([True, True, False])]
    gap = measure(parts, fresh, [["a", "b"], ["a", "b", "b"]])
    assert {name: drift.tokens for name, drift in gap.engines.items()} == {"a": 2, "b": 2}
    assert gap.engines["b"].mean == pytest.approx(0.3)
    (alarm,) = gap.alarms(BOUNDS)
    assert alarm.startswith("b: mean 0.3 above 0.001")
    assert "effective" in alarm


@pytest.mark.parametrize(
    ("drift", "told"),
    [
        (Drift(mean=2e-3), "mean 0.002 above 0.001"),
        (Drift(p99=0.02), "p99 0.02 above 0.01"),
        (Drift(max=0.2), "max 0.2 above 0.1"),
        (Drift(ess=0.99), "effective sample size 0.99 below 1"),
        (Drift(mean=math.nan), "mean nan above 0.001"),
        (Drift(ess=math.nan), "effective sample size nan below 1"),
        (Drift(mean=1e-3, p99=1e-2, max=0.1, ess=0.99995), None),
    ],
)
def test_each_number_has_a_bound_and_what_is_no_number_holds_none(drift: Drift, told: str | None) -> None:
    assert list(drift.crossed(BOUNDS)) == ([] if told is None else [told])


def test_a_few_tokens_far_off_are_an_alarm_though_the_mean_is_small() -> None:
    differences = torch.zeros(10_000)
    differences[7] = 0.5
    gap = measure([differences], [torch.ones(10_000, dtype=torch.bool)], [["engine-1"] * 10_000])
    assert gap.alarms(BOUNDS) == ["engine-1: max 0.5 above 0.1"]


def test_nothing_sampled_is_no_gap() -> None:
    gap = measure([], [], [])
    assert gap.all == gap.own == Drift()
    assert gap.alarms(BOUNDS) == []


def test_over_a_run_the_mean_is_of_all_tokens_and_the_rest_the_worst() -> None:
    first = merged(None, Drift(mean=0.1, p99=0.2, max=0.3, ess=0.9, tokens=10))
    both = merged(first, Drift(mean=0.4, p99=0.1, max=0.5, ess=0.95, tokens=20))
    assert both == {"mean": pytest.approx(0.3), "p99": 0.2, "max": 0.5, "ess": 0.9, "tokens": 30}


def test_a_metric_tells_the_gap_to_the_policies_that_sampled_the_tokens_and_none_where_there_are_none() -> None:
    differences, fresh = torch.tensor([0.5, 0.01]), torch.tensor([False, True])
    told = told_gap({"gap": measure([differences], [fresh], [["engine-0"] * 2]).facts()})
    assert told == pytest.approx({"mean": 0.01, "p99": 0.01, "max": 0.01, "ess": 1.0})
    older = measure(
        [differences], [torch.tensor([False, False])], [["engine-0"] * 2], [(torch.tensor([0.2]), ["engine-0 on p"])]
    )
    assert told_gap({"gap": older.facts()})["max"] == pytest.approx(0.2)
    assert older.alarms(BOUNDS)[0].startswith("engine-0 on p: mean 0.2 above")
    stale = measure([differences], [torch.tensor([False, False])], [["engine-0"] * 2])
    assert told_gap({"gap": stale.facts()}) == told_gap({}) == {}
