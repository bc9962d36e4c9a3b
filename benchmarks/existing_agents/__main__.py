"""The rise of the reward where agents that exist are trained by their base URL, beside the built-in loop's on the same
task and seeds.

`--task` is one of:

* words: the demo model repeats a word (`kestrl new --template reward-only`), without a tool.
* email: e-mail search, `examples/email-search/quickstart.yaml`.
* calculator: GSM8K's calculator, `examples/gsm8k/job.yaml`, from the adapter of its SFT; `--adapter` names one that is
  there.

`--agents loop,bare,openai-agents,langgraph` and `--seeds 42,43` choose the runs, each of one minute (words) to some
five on two idle cores; the frameworks are installed by uv when first needed. `--runs` keeps the runs' folders. Without
--json the rewards are also printed step by step.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from benchmarks.job_runs import Curve, kestrl, trained
from benchmarks.report import print_row

AGENTS: Mapping[str, Mapping[str, Any]] = {
    "loop": {},
    "bare": {"run": "frameworks:bare", "python": {"requirements": ["openai==3.52.0"]}},
    "openai-agents": {"run": "frameworks:openai_agents", "python": {"requirements": ["openai-agents==0.24.0"]}},
    "langgraph": {
        "run": "frameworks:langgraph",
        "python": {"requirements": ["langchain==1.5.2", "langchain-openai==1.7.4"]},
    },
}
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Task:
    """A job's manifest, in a folder with what it names."""

    source: Path | None
    """The manifest; None is the starter `reward-only`."""
    schedule: Mapping[str, Any]
    beside: tuple[Path, ...] = ()
    sft: Path | None = None
    """The job whose adapter is trained on."""
    held_out: int | None = None
    """Questions of an evaluation; None for the manifest's number."""
    groups: int | None = None
    """Groups of a step; None for the manifest's number."""

    def job(self, folder: Path) -> Path:
        """The manifest's copy in a new folder."""
        job = folder / "job.yaml"
        if self.source is None:
            kestrl("new", "--template", "reward-only", folder)
            return job
        folder.mkdir()
        for path in self.beside:
            shutil.copy(path, folder)
        shutil.copy(self.source, job)
        return job


TASKS = {
    "words": Task(None, {"epochs": 12, "maxSteps": 10}),
    "email": Task(EXAMPLES / "email-search" / "quickstart.yaml", {"epochs": 1, "maxSteps": 12}, held_out=60),
    "calculator": Task(
        EXAMPLES / "gsm8k" / "job.yaml",
        {"maxSteps": 12},
        beside=(EXAMPLES / "gsm8k" / "gsm8k.py",),
        sft=EXAMPLES / "gsm8k" / "sft.yaml",
        held_out=60,
        groups=8,
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What is run."""

    task: str
    steps: int | None
    adapter: str | None
    runs: Path


@cache
def adapter_of(sft: Path, runs: Path) -> str:
    """The address of the adapter of an SFT job."""
    return kestrl("sft", sft, "--runs", runs).splitlines()[-1]


def curve(choice: Choice, agent: str, seed: int) -> Curve:
    """The figures of a run."""
    task = TASKS[choice.task]
    folder = choice.runs / f"{choice.task}-{agent}-{seed}"
    job = task.job(folder)
    shutil.copy(Path(__file__).with_name("frameworks.py"), folder)
    document = yaml.safe_load(job.read_text(encoding="utf-8"))
    spec = document["spec"]
    if AGENTS[agent]:
        del spec["agent"]["loop"]
        spec["agent"].update(AGENTS[agent])
    spec.setdefault("tools", [])
    spec["data"]["seed"] = seed
    spec["inference"]["replicas"] = 1
    if task.held_out is not None:
        spec["data"]["validation"]["size"] = task.held_out
    if task.groups is not None:
        spec["algorithm"]["groupsPerStep"] = task.groups
    spec["schedule"] = {**task.schedule, **({"maxSteps": choice.steps} if choice.steps else {})}
    if task.sft is not None:
        spec["model"]["adapter"]["from"] = choice.adapter or adapter_of(task.sft, choice.runs / f"{choice.task}-sft")
    job.write_text(yaml.safe_dump(document), encoding="utf-8")
    return trained(job, folder / "runs")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--task", choices=list(TASKS), default="words")
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--seeds", default="42,43")
    parser.add_argument("--steps", type=int, help="steps of a run (default: 10 of words, else 12)")
    parser.add_argument("--adapter", help="address of the adapter that an SFT of the task has made")
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs (default: none)")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as place:
        runs = (options.runs or Path(place)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        choice = Choice(options.task, options.steps, options.adapter, runs)
        for seed in seeds:
            for agent in options.agents.split(","):
                figures = curve(choice, agent, seed)
                for row in figures.rows(f"existing_agents/{choice.task}/{agent}/seed_{seed}"):
                    print_row(row, as_json=options.json)
                if not options.json:
                    print(figures, flush=True)


if __name__ == "__main__":
    run()
