"""Tasks that training and validation data have in common.

Rows of reasoning-gym with neighbouring seeds are an example: task 1 of a seed is task 0 of the next one. A held-out
mean over tasks that were trained on does not say what the policy does with new ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.episode import Scenario

DIGEST = "digest"
"""Column with the digest of a row's task, as `kestrl data` writes it for tasks of an environment."""
POSITION = frozenset({"index", "split"})
"""Columns of verl's rows that say where a row stands, which differ between two data sets with the same question."""


@dataclass(frozen=True, slots=True)
class SharedTasks:
    """Scenarios of the validation data whose task is one of the training data, too."""

    scenarios: int
    """Scenarios of the validation data that share their task."""
    held_out: Scenario
    """The first of them."""
    training: Scenario
    """The first training scenario with its task."""

    def message(self, held_out_count: int, held_out_place: str, training_place: str) -> str:
        """The shared tasks and what to do about them, in a line.

        Args:
            held_out_count: Scenarios of the validation data.
            held_out_place: Where `held_out` stands, for people.
            training_place: Where `training` stands.
        """
        return (
            f"data.validation: {self.scenarios} of {held_out_count} rows have a task of data.train, such as "
            f"{held_out_place}, which is that of {training_place}; held-out means over them do not say what the policy "
            "does with new tasks. If that is not meant, remove them from one of the two, or generate data with seeds "
            "that are farther apart than their sizes"
        )


def _task(scenario: Scenario) -> bytes:
    """SHA-256 of a scenario's task: what model and rewards get, whatever its id and position.

    The task's own digest stands for the further columns, where a row has one; index and seed of such a row name the
    task in another way. Columns of a row without a ground truth are all compared, since they may be what an environment
    begins with.
    """
    columns = dict(scenario.metadata)
    if isinstance(columns.get(DIGEST), str):
        columns = {DIGEST: columns[DIGEST]}
    elif scenario.ground_truth is not None:
        columns = {name: cell for name, cell in columns.items() if name not in POSITION}
    messages, kwargs = list(scenario.messages), dict(scenario.tools_kwargs)
    text = json.dumps([messages, scenario.ground_truth, kwargs, columns], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()


def shared_tasks(training: Sequence[Scenario], held_out: Sequence[Scenario]) -> SharedTasks | None:
    """The tasks that two data sets have in common; None if there are none."""
    tasks = [_task(scenario) for scenario in held_out]
    held_out_tasks = set(tasks)
    trained: dict[bytes, Scenario] = {}
    for scenario in training if held_out_tasks else ():
        if (task := _task(scenario)) in held_out_tasks:
            trained.setdefault(task, scenario)
    shared = [(scenario, trained[task]) for scenario, task in zip(held_out, tasks, strict=True) if task in trained]
    return SharedTasks(len(shared), *shared[0]) if shared else None
