"""What a policy learns with slow tools and real engines, by what becomes of groups that grow too old: the job of
`benchmarks.slow_tools` with `maxStaleness: 1`, held-out questions before and after training, and three seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.slow_tools import train

KINDS = ("release", "wait", "continue")
SEEDS = (1, 2, 3)
GROUP_SIZE, GROUPS, STEPS, HELD_OUT, WINDOW = 8, 8, 20, 60, 4
"""Episodes of a group and groups of a step, as in the quickstart; optimiser steps, held-out questions, and steps over
which a reward of the curve is averaged."""


def curve(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Mean reward of the episodes trained on in each window of steps, and the seconds and steps until its end."""
    points: list[dict[str, float]] = []
    for end in range(WINDOW, len(steps) + 1, WINDOW):
        window = steps[end - WINDOW : end]
        episodes = sum(step["episodes"] for step in window)
        points.append(
            {
                "seconds": sum(sum(step["seconds"].values()) for step in steps[:end]),
                "step": end,
                "reward": sum(step["reward"] * step["episodes"] for step in window) / episodes,
            }
        )
    return points


def record(runs: Path, kind: str, seed: int) -> dict[str, Any]:
    """The facts of one run."""
    settings = (
        f"data.seed={seed}",
        f"schedule.maxSteps={STEPS}",
        f"algorithm.groupSize={GROUP_SIZE}",
        f"algorithm.groupsPerStep={GROUPS}",
        "data.validation.uri=demo://email/validation",
        f"data.validation.size={HELD_OUT}",
    )
    folder = runs / f"{kind}-{seed}"
    seconds, steps, history = train(folder, 1, kind, *settings)
    stale = [step["stale"] for step in steps]
    ages: Counter[int] = Counter()
    for step in steps:
        ages.update({int(age): tokens for age, tokens in step["tokens_by_staleness"].items()})
    return {
        "name": f"slow_learning/{kind}/seed_{seed}",
        "seconds": seconds,
        "curve": curve(steps),
        "held_out": {point: history[point]["reward"] for point in ("before", "after")},
        "groups_trained": sum(step["episodes"] for step in steps) / GROUP_SIZE,
        "groups_given_up": sum(facts["groups"] for facts in stale),
        "seconds_given_up": sum(facts["seconds"] for facts in stale),
        "tokens_trained": sum(step["sampled_tokens"] for step in steps),
        "tokens_masked": sum(facts["masked"] for facts in stale),
        "turns_cut": sum(step.get("cut_turns", 0.0) * step["episodes"] for step in steps),
        "turns": sum(step["num_turns"] * step["episodes"] for step in steps),
        "tokens_by_age": {str(age): ages[age] for age in sorted(ages)},
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for kind in KINDS:
                print(json.dumps(record(Path(folder), kind, seed)), flush=True)


if __name__ == "__main__":
    main()
