"""The groups that run for training, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kestrl.episode import PolicyVersion

Task = asyncio.Task[None]


@dataclass(slots=True)
class RunningGroup:
    """A running group."""

    position: int
    policy: PolicyVersion
    """The version that it began with."""
    episodes: int
    """Episodes that have not ended."""
    at: float
    """Time of dispatch by the loop's clock."""
    begun: bool = False
    """Whether the task has started to run."""


class RunningGroups:
    """Running groups by task, and those of them that are given up."""

    def __init__(self) -> None:
        self._groups: dict[Task, RunningGroup] = {}
        self._outdated: set[Task] = set()
        """Tasks whose groups became too old to be trained on."""
        self._late: set[Task] = set()
        """Tasks cancelled at their step's deadline."""

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, task: Task) -> RunningGroup:
        return self._groups[task]

    def tasks(self) -> list[Task]:
        return list(self._groups)

    def add(self, task: Task, group: RunningGroup) -> None:
        self._groups[task] = group

    def remove(self, task: Task) -> None:
        self._groups.pop(task, None)
        self._outdated.discard(task)
        self._late.discard(task)

    def episodes(self) -> int:
        """Episodes running for training; only unfinished episodes of a group count."""
        return sum(group.episodes for group in self._groups.values())

    def wanted(self) -> int:
        """Groups that are not too old to be trained on."""
        return len(self._groups) - len(self._outdated)

    def versions(self) -> list[int]:
        """Step of the policy version that every group began with which is not given up."""
        given_up = self._outdated | self._late
        return [group.policy.step for task, group in self._groups.items() if task not in given_up]

    def versions_in_use(self) -> set[str]:
        """Names of the versions that groups use which are not too old."""
        return {group.policy.name for task, group in self._groups.items() if task not in self._outdated}

    def is_outdated(self, task: Task) -> bool:
        return task in self._outdated

    def is_late(self, task: Task) -> bool:
        return task in self._late

    def end_older(self, first_step: int) -> None:
        """Ends the groups of policy versions before the step `first_step`."""
        for task, group in self._groups.items():
            if group.policy.step < first_step:
                self._outdated.add(task)
                self._end(task)

    def first(self, count: int) -> list[Task]:
        """The tasks dispatched first among those that are not too old."""
        ordered = sorted(self._groups.keys() - self._outdated, key=lambda task: self._groups[task].position)
        return ordered[: max(0, count)]

    def end_late(self, tasks: Iterable[Task]) -> None:
        """Ends groups at the deadline of their step."""
        for task in tasks:
            self._late.add(task)
            self._end(task)

    def _end(self, task: Task) -> None:
        """Cancels a group's task if it has begun. A task cancelled before it runs could not release its scenario: it
        checks by itself.
        """
        if self._groups[task].begun:
            task.cancel()
