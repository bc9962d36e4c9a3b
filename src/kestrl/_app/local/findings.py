"""The result of the check of a manifest, and what is found in its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kestrl._shared.spec.agent import Agent
from kestrl.agents.registry import BUILT_IN as LOOPS
from kestrl.agents.registry import VERL_NAMES
from kestrl.data.rows import DataRow
from kestrl.data.shared_tasks import shared_tasks
from kestrl.errors import SeveralProblems
from kestrl.rewards.registry import BUILT_IN as REWARDS

MOST_PROBLEMS = 20
"""Maximum number of reported problems of one kind."""


@dataclass(slots=True)
class Findings:
    """Result of the check of a manifest."""

    problems: list[str] = field(default_factory=list[str])
    """Problems that prevent a run. Each names the field, or file, row and field, and the fix."""
    warnings: list[str] = field(default_factory=list[str])
    """Warnings; the job can run."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Valid rows by data set."""
    unit: str = "scenarios"
    """What a row of a data set is; empty where its name says so."""
    servers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Offered tools of each server, by its name."""
    devices: list[str] = field(default_factory=list[str])
    """Accelerators of this machine, who uses them, and how one is shared."""

    @property
    def summary(self) -> str:
        """What is valid, for a person."""
        counts = [f"{count} {name} {self.unit}".rstrip() for name, count in self.rows.items()]
        return ", ".join([*counts, *(f"{name} offers {', '.join(tools)}" for name, tools in self.servers.items())])

    def as_json(self) -> dict[str, Any]:
        """All findings, for programs."""
        return {"valid": not self.problems, **asdict(self)}

    def add_misfits(self, agent: Agent, misfits: Sequence[tuple[str, str]]) -> None:
        """Adds what rows set for tools and no tool takes. Sessions open at a first call: whether a user's loop makes
        one is not known.

        Args:
            agent: The manifest's.
            misfits: Each with the `agent_name` of its row.
        """
        by_loop: dict[str, list[str]] = {}
        for name, problem in misfits:
            by_loop.setdefault(agent.loops.get(name, name) if name else agent.loop, []).append(problem)
        for name, loop in (LOOPS | {name: LOOPS[ours] for name, ours in VERL_NAMES.items()}).items():
            problems = by_loop.pop(name, ())
            self.problems += few(problems) if loop.uses_tools else ()
        for name, problems in by_loop.items():
            self.warnings += few(f"{problem}; the episode fails if {name} calls a tool" for problem in problems)

    def raise_problems(self) -> None:
        """Raises SeveralProblems, if there are any."""
        if self.problems:
            raise SeveralProblems(self.problems)


def few(problems: Iterable[str]) -> list[str]:
    """The first problems of a kind, and how many there are more."""
    all_problems = list(problems)
    unlisted = len(all_problems) - MOST_PROBLEMS
    return all_problems if unlisted <= 0 else [*all_problems[:MOST_PROBLEMS], f"... and {unlisted} more of this kind"]


def unknown_tools(rows: Sequence[DataRow], names: Sequence[str]) -> Iterator[str]:
    """Problems for names that are neither tools nor environments."""
    names_text = ", ".join(names) or "none"
    for row in rows:
        row_tools = dict.fromkeys([*(row.scenario.tools or ()), *row.scenario.tools_kwargs])
        for name in (name for name in row_tools if name not in names):
            yield f"{row.place}: tools: the job has no tool {name!r} (it has: {names_text}); add it to spec.tools"


def without_ground_truth(rows: Sequence[DataRow], rules: Sequence[str | None]) -> Iterator[str]:
    """Problems for rows without a ground truth where a built-in reward compares with it."""
    comparing = next((rule for rule in rules if rule is not None and rule in REWARDS and REWARDS[rule].compares), None)
    for row in rows:
        if comparing is not None and row.scenario.ground_truth is None:
            yield f"{row.place}: ground_truth: is null or missing, and the reward {comparing} compares with it"


def tasks_of_both(training: Sequence[DataRow], held_out: Sequence[DataRow]) -> Iterator[str]:
    """A warning for tasks that are in both data sets."""
    shared = shared_tasks([row.scenario for row in training], [row.scenario for row in held_out])
    if shared is not None:
        places = held_out[shared.held_out.ordinal].place, training[shared.training.ordinal].place
        yield f"spec.{shared.message(len(held_out), *places)}"
