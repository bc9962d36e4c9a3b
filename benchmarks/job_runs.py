"""What benchmarks of whole runs share: the program as a child process, and the figures of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row

FIGURES = ("reward", "sampled_reward", "answer_correct", "sampled_answer_correct")
"""Figures on held-out questions; `sampled_` is at the training temperature."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The figures of a run."""

    summary: Mapping[str, Any]
    rewards: list[float]
    """Mean reward of each step."""

    def rows(self, title: str) -> Iterator[Row]:
        """The held-out figures after training, beside those before it."""
        before, after = self.summary["before"], self.summary["after"]
        for name in FIGURES:
            if name in before:
                yield Row(name=f"{title}/{name}", value=after[name], unit="1", reference=before[name], against="before")

    def __str__(self) -> str:
        return "  by step: " + " ".join(f"{reward:.2f}" for reward in self.rewards)


def kestrl(*arguments: str | Path, folder: Path | None = None) -> str:
    """What a command prints.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", "kestrl._app.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def trained(job: Path, runs: Path, *arguments: str) -> Curve:
    """Runs a job in a folder that no run has used."""
    kestrl("run", job, "--runs", runs, *arguments)
    (summary,) = runs.glob("*/summary.json")
    records = [json.loads(path.read_bytes()) for path in sorted((summary.parent / "metrics").glob("*.json"))]
    return Curve(json.loads(summary.read_bytes()), [record["reward"] for record in records if "reward" in record])
