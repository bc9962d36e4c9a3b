"""Asynchronous against synchronous training with slow tools: the same number of steps of the same job on real engines.

A tool call takes 2 s and one in five takes 10 s (`benchmarks/slow`). With staleness 0 a step waits for its slowest
episode; with staleness, further groups run meanwhile; groups that would be too old are waited for, released, or
continued by newer versions (`schedule.staleGroups`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Row, main

from kestrl._shared.plan.algorithm import TOKEN_BOUND
from kestrl._shared.spec import read_job

JOB = Path(__file__).parent / "slow" / "job.yaml"
STALENESS = 3
AGAINST = "staleness 0"
GROUP_SIZE = read_job(JOB).spec.algorithm.group_size


class Run(NamedTuple):
    """What a run left behind."""

    seconds: float
    """From the first group to the last step."""
    steps: list[dict[str, Any]]
    """The metrics of each step."""
    history: dict[str, Any]
    """The history of its state."""


def train(runs: Path, staleness: int, stale_groups: str, *settings: str) -> Run:
    """One run of the job, with further `--set` of a manifest's fields."""
    name = f"stale-{staleness}-{stale_groups}"
    settings = (
        f"metadata.name={name}",
        f"algorithm.maxStaleness={staleness}",
        f"schedule.staleGroups={stale_groups}",
        *settings,
    )
    flags = [flag for item in settings for flag in ("--set", item)]
    done = subprocess.run(
        [sys.executable, "-m", "kestrl._app.cli.main", "run", str(JOB), "--runs", str(runs), *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = runs / f"{name}-1"
    steps = [json.loads(path.read_text()) for path in sorted((folder / "metrics").glob("*.json"))]
    history = json.loads((folder / "summary.json").read_text())["state"]["history"]
    return Run(sum(sum(step["seconds"].values()) for step in steps), steps, history)


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        sync = train(Path(folder), 0, "wait").seconds
        for kind in ("wait", "release", "continue"):
            overlapped, steps, _ = train(Path(folder), STALENESS, kind)
            name = f"slow_tools/{kind}"
            yield Row(name=f"{name}/seconds", value=overlapped, unit="s", reference=sync, against=AGAINST)
            yield Row(name=f"{name}/speed_up", value=sync / overlapped, unit="x", reference=2.0, against="goal")
            staleness = max(step["staleness"] for step in steps)
            allowed = STALENESS * (TOKEN_BOUND if kind == "continue" else 1)
            yield Row(name=f"{name}/staleness", value=staleness, unit="steps", reference=allowed, against="its bound")
            stale = [step["stale"] for step in steps]
            yield Row(
                name=f"{name}/masked",
                value=sum(facts["masked"] for facts in stale),
                unit="tokens",
                reference=sum(step["sampled_tokens"] for step in steps),
                against="tokens trained on",
            )
            yield Row(
                name=f"{name}/cut",
                value=sum(step.get("cut_turns", 0.0) * step["episodes"] for step in steps),
                unit="turns",
                reference=sum(step["num_turns"] * step["episodes"] for step in steps),
                against="turns trained on",
            )
            trained = sum(step["episodes"] for step in steps) / GROUP_SIZE
            yield Row(
                name=f"{name}/given_up",
                value=sum(facts["groups"] for facts in stale),
                unit="groups",
                reference=trained,
                against="groups trained on",
            )
            yield Row(
                name=f"{name}/given_up_seconds",
                value=sum(facts["seconds"] for facts in stale),
                unit="s",
                reference=sum(step["duration"] for step in steps) / len(steps) * trained,
                against="mean episode x groups trained on",
            )


if __name__ == "__main__":
    main(__doc__, measure)
