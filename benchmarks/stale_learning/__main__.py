"""Learning curves of three seeds for what becomes of a running group that an update makes too old: `release`, `wait`,
and `continue` (see `benchmarks.stale_groups`, whose clock and rules these are).

A tiny model plays a task of several turns in process and is trained by the learner's own code, for the same simulated
time in every mode. Each run is a process of its own with one thread, some at a time. A line of JSON a run; with
`--out`, lines are appended to that file, and runs that it holds are not repeated. A table follows on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.stale_groups.simulation import MODES, SEEDS, Mode
from benchmarks.stale_groups.workloads import WORKLOADS

from kestrl._shared.plan.components import TORCH_DEFAULTS

TAUGHT = 300
"""Steps of the base model's training."""
THRESHOLD = 0.6
"""Held-out reward whose time is reported."""
AT = (0.25, 0.5, 0.75, 1.0)
"""Shares of the simulated time at which rewards are compared."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's place in the table."""

    workload: str
    staleness: int
    mode: Mode
    seed: int

    @property
    def name(self) -> str:
        return f"stale_learning/{self.workload}/staleness_{self.staleness}/{self.mode}/seed_{self.seed}"


def one(run: Run, base: Path, plan: Line) -> Line:
    """A run in this process."""
    import torch
    from benchmarks.stale_learning.learning import Learning, Plan

    torch.set_num_threads(1)
    workload = next(workload for workload in WORKLOADS if workload.name == run.workload)
    learning = Learning(workload, run.staleness, run.mode, seed=run.seed, base=base, plan=Plan(**plan))
    outcome = learning.run()
    spent = {"engine_time_given_up": outcome.given_up / outcome.work}
    return {"name": run.name, **asdict(run), **learning.record.facts(), **spent}


def alone(run: Run, base: Path, plan: Line) -> Line:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.stale_learning", "--only", str(base)]
    described = json.dumps({"run": asdict(run), "plan": plan})
    environment = {**TORCH_DEFAULTS, **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=described, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def lines(runs: Sequence[Run], plan: Line, taught: int, folder: Path, at_a_time: int) -> Iterator[Line]:
    """Runs, as they end."""
    from benchmarks.stale_learning.lookups import base_model

    base = base_model(folder, taught)
    with ThreadPoolExecutor(at_a_time) as pool:
        for ended in as_completed([pool.submit(alone, run, base, plan) for run in runs]):
            yield ended.result()


def table(done: Sequence[Line]) -> str:
    """Means over seeds with their ranges, of each workload, staleness and mode."""
    head = [f"reward at {share:.0%} of the time" for share in AT]
    columns = [*head, f"seconds to {THRESHOLD}", "steps", "engine time given up", "masked, of long", "age", "ESS"]
    rows = [["", *columns], ["---"] * (1 + len(columns))]
    cells = dict.fromkeys((line["workload"], line["staleness"], line["mode"]) for line in done)
    for cell in cells:
        of_cell = [line for line in done if (line["workload"], line["staleness"], line["mode"]) == cell]
        rows.append([f"{cell[0]}, {cell[1]}, {cell[2]}", *_figures(of_cell)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figures(of_cell: Sequence[Line]) -> Iterator[str]:
    for share in AT:
        yield _spread(of_cell, lambda line, share=share: _reward(line, share))
    times = [seconds_to(line, THRESHOLD) for line in of_cell]
    reached = [time for time in times if time is not None]
    yield (
        f"{min(reached):.0f} to {max(reached):.0f}" if len(reached) == len(times) else f"{len(reached)} seeds reach it"
    )
    yield _spread(of_cell, lambda line: line["steps"], ".0f")
    yield f"{fmean(line['engine_time_given_up'] for line in of_cell):.0%}"
    yield f"{fmean(line['masked'] for line in of_cell):.0%}, {fmean(line['masked_of_long'] for line in of_cell):.0%}"
    yield f"{fmean(line['age'] for line in of_cell):.2f}"
    yield f"{fmean(line['statistics']['ess'] for line in of_cell):.3f}"


def _reward(line: Line, share: float) -> float:
    points = line["points"]
    reward: float = points[round(share * (len(points) - 1))]["reward"]
    return reward


def seconds_to(line: Line, threshold: float) -> float | None:
    """Simulated time of the first point of a run's curve that reaches a reward."""
    return next((point["seconds"] for point in line["points"] if point["reward"] >= threshold), None)


def _spread(of_cell: Sequence[Line], figure: Callable[[Line], float], form: str = ".3f") -> str:
    figures = [figure(line) for line in of_cell]
    return f"{fmean(figures):{form}} ({min(figures):{form}} to {max(figures):{form}})"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale_learning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and little time, which measures nothing")
    parser.add_argument("--json", action="store_true", help="as of other benchmarks: lines are JSON in any case")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--base", type=Path, help="folder that keeps the base model for other runs")
    parser.add_argument("--workloads", nargs="+", default=["agent"], choices=[each.name for each in WORKLOADS[:2]])
    parser.add_argument("--staleness", nargs="+", type=int, default=[1])
    parser.add_argument("--at-a-time", type=int, default=2, help="runs at a time")
    options = parser.parse_args(arguments)
    done: list[Line] = []
    if options.out and options.out.exists():
        done = [json.loads(text) for text in options.out.read_text().splitlines()]
    names = {line["name"] for line in done}
    seeds, plan, taught = (
        (SEEDS[:1], {"seconds": 200.0, "curve": 2, "held_out": 20}, 5) if options.quick else (SEEDS, {}, TAUGHT)
    )
    runs = [
        Run(workload=workload, staleness=staleness, mode=mode, seed=seed)
        for workload, staleness, seed, mode in product(options.workloads, options.staleness, seeds, MODES)
    ]
    missing = [run for run in runs if run.name not in names]
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(missing, plan, taught, options.base or Path(folder), options.at_a_time):
            done.append(line)
            print(json.dumps(line), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(table(done), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        described = json.load(sys.stdin)
        print(json.dumps(one(Run(**described["run"]), Path(sys.argv[2]), described["plan"])))
    else:
        main(sys.argv[1:])
