"""Log-prob mismatch: its statistics, attribution to engines, and bounds."""

from __future__ import annotations

import math

import pytest
import torch

from kestrl._shared.plan.updates import gap_bounds
from kestrl.runstate.history import Mismatch
from kestrl_learner.store.opentelemetry_sink import gap_statistics
from kestrl_learner.train.logprob_mismatch import measure
from kestrl_learner.train.mismatch_stats import MismatchStats

BOUNDS = gap_bounds(1e-3)


def test_statistics_match_values_computed_by_hand() -> None:
    differences = torch.tensor([0.0] * 98 + [0.1, -0.4])
    on_policy = torch.tensor([True] * 99 + [False])
    mismatch = measure([differences], [on_policy], [["engine-0"] * 100])
    assert (mismatch.all.tokens, mismatch.own.tokens) == (100, 99)
    assert mismatch.all.mean == pytest.approx(0.005)
    assert mismatch.all.max == pytest.approx(0.4)
    assert mismatch.all.p99 == pytest.approx(0.1)
    assert mismatch.own.mean == pytest.approx(0.1 / 99)
    weights = [math.exp(value) for value in differences]
    assert mismatch.all.ess == pytest.approx(sum(weights) ** 2 / (100 * sum(weight**2 for weight in weights)), rel=1e-5)


def test_each_engine_is_measured_on_its_own_tokens_of_the_newest_policy() -> None:
    parts = [torch.tensor([0.0, 0.2]), torch.tensor([0.0, 0.4, 0.0])]
    on_policy = [torch.tensor([True, True]), torch.tensor([True, True, False])]
    mismatch = measure(parts, on_policy, [["a", "b"], ["a", "b", "b"]])
    assert {name: stats.tokens for name, stats in mismatch.engines.items()} == {"a": 2, "b": 2}
    assert mismatch.engines["b"].mean == pytest.approx(0.3)
    (alarm,) = mismatch.alarms(BOUNDS)
    assert alarm.startswith("b: mean 0.3 above 0.001")
    assert "effective" in alarm


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (MismatchStats(mean=2e-3), "mean 0.002 above 0.001"),
        (MismatchStats(p99=0.02), "p99 0.02 above 0.01"),
        (MismatchStats(max=0.2), "max 0.2 above 0.1"),
        (MismatchStats(ess=0.99), "effective sample size 0.99 below 1"),
        (MismatchStats(mean=math.nan), "mean nan above 0.001"),
        (MismatchStats(ess=math.nan), "effective sample size nan below 1"),
        (MismatchStats(mean=1e-3, p99=1e-2, max=0.1, ess=0.99995), None),
    ],
)
def test_each_statistic_has_a_bound_and_nan_crosses_it(stats: MismatchStats, expected: str | None) -> None:
    assert list(stats.crossed(BOUNDS)) == ([] if expected is None else [expected])


def test_a_few_tokens_far_off_are_an_alarm_though_the_mean_is_small() -> None:
    differences = torch.zeros(10_000)
    differences[7] = 0.5
    mismatch = measure([differences], [torch.ones(10_000, dtype=torch.bool)], [["engine-1"] * 10_000])
    assert mismatch.alarms(BOUNDS) == ["engine-1: max 0.5 above 0.1"]


def test_without_sampled_tokens_there_is_no_mismatch() -> None:
    mismatch = measure([], [], [])
    assert mismatch.all == mismatch.own == MismatchStats()
    assert mismatch.alarms(BOUNDS) == []


def test_over_a_run_the_mean_is_of_all_tokens_and_the_rest_the_worst() -> None:
    first = Mismatch(mean=0.1, p99=0.2, max=0.3, ess=0.9, tokens=10)
    both = first.merged(Mismatch(mean=0.4, p99=0.1, max=0.5, ess=0.95, tokens=20))
    assert both.model_dump() == {"mean": pytest.approx(0.3), "p99": 0.2, "max": 0.5, "ess": 0.9, "tokens": 30}


def test_the_metric_is_the_mismatch_to_the_policies_that_sampled() -> None:
    differences, on_policy = torch.tensor([0.5, 0.01]), torch.tensor([False, True])
    statistics = gap_statistics({"gap": measure([differences], [on_policy], [["engine-0"] * 2]).facts()})
    assert statistics == pytest.approx({"mean": 0.01, "p99": 0.01, "max": 0.01, "ess": 1.0})
    older = measure(
        [differences], [torch.tensor([False, False])], [["engine-0"] * 2], [(torch.tensor([0.2]), ["engine-0 on p"])]
    )
    assert gap_statistics({"gap": older.facts()})["max"] == pytest.approx(0.2)
    assert older.alarms(BOUNDS)[0].startswith("engine-0 on p: mean 0.2 above")
    stale = measure([differences], [torch.tensor([False, False])], [["engine-0"] * 2])
    assert gap_statistics({"gap": stale.facts()}) == gap_statistics({}) == {}
