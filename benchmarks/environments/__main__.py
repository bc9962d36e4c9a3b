"""The rise of the reward where environments of others train the demo model, each as it is and with ten lines of YAML.

`--environment` is one or several of:

* reasoning-gym: the generator `coin_flip`, after an SFT on a few of its own solutions.
* verifiers: the task set `word-tasks` (tests/data), through verifiers' environment server.
* trl: a class for TRL's `environment_factory`: a word is searched for by a call.
* openenv: a server of OpenEnv: a word is repeated by an action.

The held-out tasks are no tasks of the training, but for those of `coin_flip`, which has ten in all. `--seeds 42,43`
chooses the runs, each of some three minutes on two idle cores; uv installs the packages when they are first needed.
`--runs` keeps the runs' folders. Without --json the rewards are also printed step by step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.job_runs import Curve, kestrl, trained
from benchmarks.report import print_row

HERE = Path(__file__).parent
WORD_TASKS = HERE.parents[1] / "tests" / "data" / "word_tasks"
WORDS = (
    "lamp", "chair", "table", "spoon", "fork", "door", "shelf", "mirror", "vase", "clock", "stool", "bench", "plate",
    "candle", "basket", "carpet", "bottle", "pillow", "hammer", "ladder", "button", "pencil", "kettle", "window",
)  # fmt: skip
HELD_OUT = ("desk", "rug", "sofa", "bucket", "curtain", "needle", "saucer", "drawer")
COIN_FLIP = '{"min_trials": 1, "max_trials": 2}'
SOLUTIONS, TASKS, HELD_OUT_TASKS = 240, 256, 32
FAR = 1_000_000
"""Distance of seeds: task 1 of a seed is task 0 of the next one."""


def write_jsonl(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def coin_flip(folder: Path, seed: int) -> list[str]:
    """Tasks of the generator, and a model that has seen some of its solutions."""

    def listed(name: str, seed: int, size: int, *options: str) -> None:
        arguments = ("--config", COIN_FLIP, "--size", str(size), "--seed", str(seed), "--out", folder / name)
        kestrl("data", "reasoning-gym", "coin_flip", *arguments, *options)

    listed("train.jsonl", seed * FAR, TASKS)
    listed("held_out.jsonl", (seed + 1) * FAR, HELD_OUT_TASKS)
    listed("solutions.jsonl", (seed + 2) * FAR, SOLUTIONS, "--transcripts")
    shutil.copy(HERE / "reasoning-gym-sft.yaml", folder / "sft.yaml")
    adapter = kestrl("sft", folder / "sft.yaml", "--runs", folder / "sft").splitlines()[-1]
    return ["--set", f"model.adapter.from={adapter}"]


def word_tasks(folder: Path, seed: int) -> list[str]:
    """The words as tasks of verifiers."""
    del seed
    shutil.copytree(WORD_TASKS, folder / "word_tasks")
    for name, words in {"train.jsonl": WORDS, "held_out.jsonl": HELD_OUT}.items():
        config = json.dumps({"words": words})
        kestrl("data", "verifiers", "word-tasks", "--config", config, "--out", folder / name, folder=folder)
    return []


def words_of(row: Callable[[str], Mapping[str, Any]]) -> Callable[[Path, int], list[str]]:
    """Writes the words as rows, beside the class and the server."""

    def write(folder: Path, seed: int) -> list[str]:
        del seed
        for module in ("repeat.py", "repeat_server.py"):
            shutil.copy(HERE / module, folder)
        for name, words in {"train.jsonl": WORDS, "held_out.jsonl": HELD_OUT}.items():
            write_jsonl(folder / name, ({"id": word, **row(word)} for word in words))
        return []

    return write


def question(word: str) -> list[Mapping[str, str]]:
    """A question that the demo model answers by a search."""
    return [
        {"role": "system", "content": "You are an email search agent. Find the mails with search_emails."},
        {"role": "user", "content": f"When does the flight to {word} leave?"},
    ]


ENVIRONMENTS: Mapping[str, Callable[[Path, int], list[str]]] = {
    "reasoning-gym": coin_flip,
    "verifiers": word_tasks,
    "trl": words_of(lambda word: {"prompt": question(word), "word": word}),
    "openenv": words_of(lambda word: {"reset": {"word": word}}),
}
"""Writes what a manifest names, and returns the further options of its run."""


def curve(environment: str, seed: int, steps: int | None, runs: Path) -> Curve:
    """The figures of a run."""
    folder = runs / f"{environment}-{seed}"
    folder.mkdir()
    options = ENVIRONMENTS[environment](folder, seed)
    job = folder / "job.yaml"
    shutil.copy(HERE / f"{environment}.yaml", job)
    settings = [f"data.seed={seed}", "evaluation={samples: 4, temperature: 1.0}"]
    settings += [f"schedule.maxSteps={steps}"] if steps else []
    return trained(job, folder / "runs", *options, *(part for text in settings for part in ("--set", text)))


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--environment", default=",".join(ENVIRONMENTS))
    parser.add_argument("--seeds", default="42")
    parser.add_argument("--steps", type=int, help="steps of a run (default: those of its manifest)")
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs (default: none)")
    options = parser.parse_args()
    environments: list[str] = options.environment.split(",")
    if unknown := [name for name in environments if name not in ENVIRONMENTS]:
        parser.error(f"--environment: {unknown[0]} is none of {', '.join(ENVIRONMENTS)}")
    with tempfile.TemporaryDirectory() as place:
        runs = (options.runs or Path(place)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        for seed in map(int, options.seeds.split(",")):
            for environment in environments:
                figures = curve(environment, seed, options.steps, runs)
                for row in figures.rows(f"environments/{environment}/seed_{seed}"):
                    print_row(row, as_json=options.json)
                if not options.json:
                    print(figures, flush=True)


if __name__ == "__main__":
    run()
