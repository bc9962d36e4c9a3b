"""Tasks of two data sets, compared as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl._shared.spec.job import DataSet
from kestrl.data import load_scenarios, locate_data
from kestrl.data.shared_tasks import SharedTasks, shared_tasks
from kestrl.episode import Scenario

ROOT = Path(__file__).parents[3]


def compared(folder: Path, training: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> SharedTasks | None:
    scenarios: list[list[Scenario]] = []
    for name, rows in {"train": training, "held": held_out}.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        scenarios.append(load_scenarios(path, promptless=True))
    return shared_tasks(*scenarios)


def gym_rows(seed: int, size: int) -> list[dict[str, Any]]:
    """Rows as `kestrl data reasoning-gym` writes them, whose task is decided by the sum of seed and index."""
    tasks = [(index, f"{seed + index}") for index in range(size)]
    return [
        {"id": f"sum-{seed}-{index}", "prompt": f"{task}?", "index": index, "seed": seed, "digest": task}
        for index, task in tasks
    ]


def test_rows_of_neighbouring_seeds_are_one_task(tmp_path: Path) -> None:
    shared = compared(tmp_path, gym_rows(42, 10), gym_rows(50, 4))
    assert shared is not None
    assert (shared.scenarios, shared.held_out.id, shared.training.id) == (2, "sum-50-0", "sum-42-8")
    assert shared.message(4, "held.jsonl:1", "train.jsonl:9").startswith(
        "data.validation: 2 of 4 rows have a task of data.train, such as held.jsonl:1, which is that of train.jsonl:9; "
    )
    assert compared(tmp_path, gym_rows(42, 10), gym_rows(52, 4)) is None


def verl_row(question: str, answer: str, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer},
        "extra_info": extra,
    }


@pytest.mark.parametrize(
    ("training", "held_out", "same"),
    [
        ({"id": "a", "question": "1 + 1?", "answer": "2"}, {"id": "b", "question": "1 + 1?", "answer": "2"}, True),
        ({"question": "1 + 1?"}, {"prompt": [{"role": "user", "content": "1 + 1?"}]}, True),
        ({"question": "1 + 1?", "answer": "2"}, {"question": "1 + 1?", "answer": "3"}, False),
        ({"prompt": "Find the way.", "maze": 1}, {"prompt": "Find the way.", "maze": 2}, False),
        ({"maze": 1, "index": 0}, {"maze": 1, "index": 0}, True),
        ({"index": 0}, {"index": 1}, False),
        ({"prompt": "Play.", "digest": "same"}, {"prompt": "Sing.", "digest": "same"}, False),
        (verl_row("1?", "1", index=3, split="train"), verl_row("1?", "1", index=0, split="test"), True),
        (
            verl_row("1?", "1", tools_kwargs={"add": {"create_kwargs": {"to": 1}}}),
            verl_row("1?", "1", tools_kwargs={"add": {"create_kwargs": {"to": 2}}}),
            False,
        ),
    ],
)
def test_a_task_is_what_model_and_rewards_get(
    tmp_path: Path, training: dict[str, Any], held_out: dict[str, Any], same: bool
) -> None:
    assert (compared(tmp_path, [training], [held_out]) is not None) is same


def generated_jobs() -> list[AgentRLJob]:
    """The examples whose data are generated here."""
    paths = sorted((ROOT / "examples").rglob("*.yaml"))
    manifests = [manifest for path in paths for manifest in yaml.safe_load_all(path.read_text())]
    jobs = [parse_job(manifest) for manifest in manifests if manifest.get("kind") == "AgentRLJob"]
    return [job for job in jobs if len(sets(job)) == 2 and all(each.uri.startswith("demo://") for each in sets(job))]


def sets(job: AgentRLJob) -> list[DataSet]:
    return [each for each in (job.spec.data.train, job.spec.data.validation) if each is not None]


def test_generated_data_of_the_examples_have_no_task_in_common(tmp_path: Path) -> None:
    jobs = generated_jobs()
    assert len(jobs) >= 5
    for job in jobs:
        paths = [
            locate_data(data.uri, size=data.size, base=ROOT, seed=job.spec.data.seed, cache_dir=tmp_path, field="data")
            for data in sets(job)
        ]
        assert shared_tasks(*map(load_scenarios, paths)) is None, job.metadata.name
