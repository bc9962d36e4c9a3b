"""Asynchronous against synchronous training with slow tools: the same number of steps of the same job, real engines and all.

A tool call takes 2 s and one in five takes 10 s (`benchmarks/slow`). With staleness 0 a step waits for its slowest episode; with
staleness, further groups run meanwhile, and what would be too old is given up and attempted again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Row, main

JOB = Path(__file__).parent / "slow" / "job.yaml"
STALENESS = 3
AGAINST = "staleness 0"


def train(runs: Path, staleness: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the first group to the last step, and each step's facts."""
    name = f"stale-{staleness}"
    settings = (f"metadata.name={name}", f"algorithm.maxStaleness={staleness}")
    flags = [flag for item in settings for flag in ("--set", item)]
    done = subprocess.run(
        [sys.executable, "-m", "kestrl.cli.main", "run", str(JOB), "--runs", str(runs), *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(path.read_text()) for path in sorted((runs / f"{name}-1" / "metrics").glob("*.json"))]
    return sum(sum(step["seconds"].values()) for step in steps), steps


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        sync, _ = train(Path(folder), 0)
        overlapped, steps = train(Path(folder), STALENESS)
        yield Row(name="slow_tools/seconds", value=overlapped, unit="s", reference=sync, against=AGAINST)
        yield Row(name="slow_tools/speed_up", value=sync / overlapped, unit="x", reference=2.0, against="goal")
        staleness = max(step["staleness"] for step in steps)
        yield Row(
            name="slow_tools/staleness", value=staleness, unit="steps", reference=STALENESS, against="maxStaleness"
        )


if __name__ == "__main__":
    main(__doc__, measure)
