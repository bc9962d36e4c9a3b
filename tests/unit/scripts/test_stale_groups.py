"""The simulation of `benchmarks.stale_groups` by the rules of the product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks.stale_groups.simulation import PREFILL, UNBOUNDED, Simulation
from benchmarks.stale_groups.workloads import WORKLOADS

(ONE_TURN,) = (workload for workload in WORKLOADS if workload.name == "one_turn")


class Observed(Simulation):
    """A run that keeps the ages of the turns that ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ONE_TURN, slots=UNBOUNDED, seed=1, prefill=PREFILL, bound=4, **options)
        self.ages = Counter[int]()

    def _sampled(self, number: int) -> None:
        self.ages[self.version - self.episodes[number].version] += 1
        super()._sampled(number)


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_turn_outlives_a_version_that_is_too_old(staleness: int) -> None:
    run = Observed(staleness=staleness, mode="continue")
    outcome = run.run()
    assert max(run.ages) == staleness
    assert 0.0 < outcome.cut <= outcome.given_up < outcome.work
    assert all(
        work > 0.0 and group.tokens[version] for group in run.running.values() for version, work in group.work.items()
    )


def test_only_groups_that_continue_have_turns_cut() -> None:
    run = Observed(staleness=1, mode="wait")
    assert run.run().cut == 0.0
