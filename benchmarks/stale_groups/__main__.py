"""Simulated cost of stragglers with staleness: what becomes of a running group that an update makes too old.

`release` gives it up and attempts its scenario again, `wait` has the step wait for it, `continue` lets it go on: each
turn is sampled by the newest version when it begins, and tokens older than a bound are masked.

Discrete events with the learner's own rules of admission and waiting. Engines share their time among the turns that
are sampled: up to SLOTS turns run at full speed, more slow each other down. A turn decodes its tokens after it has
computed those of its prefix that are not in the engine's cache: what the last tool call answered, or, when the version
differs from the turn's before, the whole prefix, since keys and values belong to a version. A turn that an update finds
running ends with the version that it began with, unless that is too old by the rollout worker's own rule: then it is
cut, and sampled again by the newest version from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import fmean

from benchmarks.report import Row, main
from benchmarks.stale_groups.simulation import MODES, PREFILL, SEEDS, STEPS, UNBOUNDED, Mode, Outcome, Simulation
from benchmarks.stale_groups.workloads import WORKLOADS, Workload

from kestrl._shared.plan.algorithm import TOKEN_BOUND

CELLS = (
    *((workload, slots, PREFILL) for workload in WORKLOADS for slots in (UNBOUNDED, 16)),
    *((WORKLOADS[0], slots, PREFILL / 5) for slots in (UNBOUNDED, 16)),
)
BOUNDS = (1, 2, TOKEN_BOUND, 8)


def measure() -> Iterator[Row]:
    for workload, slots, prefill in CELLS:
        engines = "room" if slots == UNBOUNDED else f"{slots}_turns"
        for staleness in (1, 2, 4):
            at = f"stale_groups/{workload.name}/{engines}/prefill_{prefill:g}/staleness_{staleness}"
            yield from _rows(at, {mode: _runs(workload, staleness, slots, mode, prefill) for mode in MODES})
    for workload, staleness, bound in product(WORKLOADS[:2], (1, 2, 4), BOUNDS):
        runs = _runs(workload, staleness, UNBOUNDED, "continue", bound=bound)
        at = f"stale_groups/{workload.name}/room/prefill_{PREFILL:g}/staleness_{staleness}/continue/bound_{bound}"
        yield Row(name=at, value=fmean(run.seconds for run in runs) / STEPS, unit="s/step")
        yield Row(name=f"{at}/age", value=fmean(run.age for run in runs), unit="steps")
        yield from _masked_rows(at, runs)


def _runs(
    workload: Workload, staleness: int, slots: int, mode: Mode, prefill: float = PREFILL, bound: int = TOKEN_BOUND
) -> list[Outcome]:
    return [
        Simulation(workload, staleness, slots, mode, seed=seed, prefill=prefill, bound=bound).run() for seed in SEEDS
    ]


def _rows(at: str, runs: dict[Mode, list[Outcome]]) -> Iterator[Row]:
    release = fmean(run.seconds for run in runs["release"]) / STEPS
    for mode, mode_runs in runs.items():
        seconds = fmean(run.seconds for run in mode_runs) / STEPS
        yield Row(name=f"{at}/{mode}", value=seconds, unit="s/step", reference=release, against="release")
        speed = fmean(run.trained.total() / run.seconds for run in mode_runs)
        yield Row(name=f"{at}/{mode}/trained", value=speed, unit="tokens/s")
        share = fmean(run.given_up / run.work for run in mode_runs)
        yield Row(name=f"{at}/{mode}/given_up", value=share, unit="of engine time")
        yield Row(name=f"{at}/{mode}/age", value=fmean(run.age for run in mode_runs), unit="steps")
        yield Row(name=f"{at}/{mode}/oldest", value=max(max(run.trained) for run in mode_runs), unit="steps")
    continued = runs["continue"]
    yield Row(
        name=f"{at}/continue/again", value=fmean(run.repeated / run.work for run in continued), unit="of engine time"
    )
    cut = fmean(run.cut / run.work for run in continued)
    yield Row(name=f"{at}/continue/cut", value=cut, unit="of engine time")
    yield from _masked_rows(f"{at}/continue", continued)


def _masked_rows(at: str, runs: list[Outcome]) -> Iterator[Row]:
    masked = fmean(run.masked / (run.masked + run.trained.total()) for run in runs)
    yield Row(name=f"{at}/masked", value=masked, unit="of tokens")
    masked = fmean(run.long[False] / run.long.total() for run in runs)
    yield Row(name=f"{at}/masked_of_long", value=masked, unit="of long scenarios' tokens")


if __name__ == "__main__":
    main(__doc__, measure)
