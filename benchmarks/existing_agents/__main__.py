"""The rise of the reward where agents that exist are trained by their base URL, beside the built-in loop's on the same
task and seeds: the demo model repeats a word (`kestrl new --template reward-only`).

`--agents loop,bare,openai-agents,langgraph` and `--seeds 42,43` choose the runs, each of about a minute on two idle
cores; the frameworks are installed by uv when first needed. Without --json the rewards are also printed step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from benchmarks.report import Row, print_row

AGENTS: Mapping[str, Mapping[str, Any]] = {
    "loop": {"loop": "single_turn"},
    "bare": {"run": "agents:bare"},
    "openai-agents": {"run": "agents:openai_agents", "python": {"requirements": ["openai-agents==0.24.0"]}},
    "langgraph": {
        "run": "agents:langgraph",
        "python": {"requirements": ["langchain==1.5.2", "langchain-openai==1.7.4"]},
    },
}
STEPS = 10


def kestrl(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "kestrl._app.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def curve(agent: str, seed: int, steps: int) -> tuple[Mapping[str, Any], list[float]]:
    """The summary of a run, and the mean reward of each step."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        kestrl("new", "--template", "reward-only", folder)
        (folder / "agents.py").write_bytes(Path(__file__).with_name("agents.py").read_bytes())
        job = folder / "job.yaml"
        document = yaml.safe_load(job.read_text(encoding="utf-8"))
        document["spec"]["agent"] = {"maxTurns": 1, "maxTokens": 16, **AGENTS[agent]}
        document["spec"].setdefault("tools", [])
        document["spec"]["data"]["seed"] = seed
        document["spec"]["schedule"] = {"epochs": 12, "maxSteps": steps}
        job.write_text(yaml.safe_dump(document), encoding="utf-8")
        kestrl("run", job, "--runs", folder / "runs")
        (run,) = (folder / "runs").iterdir()
        summary = json.loads((run / "summary.json").read_bytes())
        records = [json.loads(path.read_bytes()) for path in sorted((run / "metrics").glob("*.json"))]
        return summary, [record["reward"] for record in records if "reward" in record]


def measure(agents: list[str], seeds: list[int], steps: int) -> Iterator[tuple[Row, list[float]]]:
    """The reward at the training temperature after the run, beside that before it."""
    for seed in seeds:
        for agent in agents:
            summary, rewards = curve(agent, seed, steps)
            before, after = (summary[when]["sampled_reward"] for when in ("before", "after"))
            name = f"existing_agents/{agent}/seed_{seed}/reward"
            yield Row(name=name, value=after, unit="1", reference=before, against="before"), rewards


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--seeds", default="42,43")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for row, rewards in measure(options.agents.split(","), seeds, options.steps):
        print_row(row, as_json=options.json)
        if not options.json:
            print("  by step: " + " ".join(f"{reward:.2f}" for reward in rewards), flush=True)


if __name__ == "__main__":
    run()
