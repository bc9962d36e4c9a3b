"""`python -m kestrl_tools.check`: checks that the job's tools can be loaded and that the rows fit them, and reports
the tools' definitions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kestrl.checking import ToolsCheck, run_check
from kestrl.data.rows import read_rows
from kestrl.errors import ToolFailure
from kestrl.plan.settings import DataSettings
from kestrl_tools.catalogue import Tool
from kestrl_tools.lifecycle import loaded
from kestrl_tools.rows import check_row
from kestrl_tools.tool_threads import ToolThreads

MOST_PROBLEMS = 1000
"""Maximum number of reported rows."""


def check(settings: ToolsCheck) -> dict[str, Any]:
    """Returns the definitions of the tools, and the problems of rows with them.

    Raises:
        UserInputError: Tools cannot be loaded.
    """
    sys.path[:0] = settings.tools.python_path
    return asyncio.run(_check(settings))


async def _check(settings: ToolsCheck) -> dict[str, Any]:
    folder = next(iter(settings.tools.python_path), None)
    async with loaded(settings.tools.tools, ToolThreads(), folder=folder) as tools:
        return _found(settings, tools)


def _found(settings: ToolsCheck, tools: Mapping[str, Tool]) -> dict[str, Any]:
    return {
        "tools": [
            {
                "name": tool.schema.name,
                "description": tool.schema.description,
                "parameters": dict(tool.schema.parameters),
                "environment": tool.provider.name if tool.provider.environment else "",
            }
            for tool in tools.values()
        ],
        "rows": list(islice(_misfits(tools, settings.data), MOST_PROBLEMS)),
    }


def _misfits(tools: Mapping[str, Tool], data: Mapping[str, DataSettings]) -> Iterator[tuple[str, str]]:
    """The agent loop of each row that does not fit, and the problem."""
    for file in data.values():
        for row in read_rows(Path(file.path), size=file.size):
            try:
                check_row(tools, row.scenario.tools, row.scenario.tools_kwargs)
            except ToolFailure as error:
                if error.code != "unknown_tool":  # the command reports names with all names of the job
                    yield row.scenario.agent, f"{row.place}: {error}"


if __name__ == "__main__":
    run_check(ToolsCheck, check)
