"""Loops that rows may choose by `agent_name` in a job whose agent is outside of the worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kestrl.errors import SeveralProblems

if TYPE_CHECKING:
    from kestrl.data.rows import DataRow

MAX_PROBLEMS = 20


def loop_problem(name: str, *, runner: str, loops: Collection[str]) -> str:
    """What is wrong with a row that names a loop which the manifest does not.

    Args:
        name: The row's `agent_name`.
        runner: The manifest's field that runs the other episodes, such as `agent.run`.
        loops: The names in `agent.loops`.
    """
    if not runner.startswith("agent."):
        return f"agent_name: {name!r} is a loop, and {runner} runs the job's episodes itself; remove the column"
    hint = f" (it has: {', '.join(loops)})" if loops else ""
    return (
        f"agent_name: {name!r} is a loop of the worker, and the job's episodes are run by {runner}; remove the column, "
        f"or list the loop in spec.agent.loops{hint}, such as {{{name}: tool_agent}}, to mix both"
    )


def check_loops(rows: Iterable[DataRow], *, runner: str, loops: Collection[str]) -> None:
    """Refuses rows that a loop would attempt in place of the job's agent.

    Args:
        rows: The rows.
        runner: As for `loop_problem`.
        loops: The names in `agent.loops`.

    Raises:
        SeveralProblems: Rows name other loops; one for each, up to 20.
    """
    problems = [
        f"{row.place}: {loop_problem(row.scenario.agent, runner=runner, loops=loops)}"
        for row in rows
        if row.scenario.agent and row.scenario.agent not in loops
    ]
    if problems:
        remainder = ["... and more of this kind"] if len(problems) > MAX_PROBLEMS else []
        raise SeveralProblems([*problems[:MAX_PROBLEMS], *remainder])
