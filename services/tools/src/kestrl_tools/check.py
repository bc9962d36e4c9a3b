"""`python -m kestrl_tools.check`: checks that the job's tools can be loaded and that the rows fit them, and reports
the tools' definitions.

A server of a cluster, whose name does not resolve on this machine, is not contacted: it is a warning.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kestrl._shared.checking import ToolsCheck, run_check
from kestrl._shared.plan.servers import is_cluster_name, server_at
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.data.rows import read_rows
from kestrl.errors import ToolFailure
from kestrl_tools.catalogue import Tool
from kestrl_tools.lifecycle import loaded
from kestrl_tools.python_provider import PythonProvider
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
    entries = list(enumerate(settings.tools.tools))
    away = {index: place for index, entry in entries if (place := await asyncio.to_thread(unresolved, entry))}
    fields = [f"spec.tools[{index}]" for index, _ in entries if index not in away]
    present = [entry for index, entry in entries if index not in away]
    async with loaded(present, ToolThreads(), folder=folder, fields=fields) as tools:
        return {
            **_found(settings, tools),
            "away": [settings.tools.tools[index].name for index in away],
            "warnings": [
                *_undescribed(tools),
                *(
                    f"spec.tools[{index}].{field}: {host} is a name of a cluster, which does not resolve here: its "
                    "tools, and what rows say of them, are not checked"
                    for index, (field, host) in away.items()
                ),
            ],
        }


def _undescribed(tools: Mapping[str, Tool]) -> Iterator[str]:
    """Warnings for Python tools of which the model sees a name and nothing else; texts of servers are not ours."""
    for tool in tools.values():
        if isinstance(tool.provider, PythonProvider) and not tool.schema.description.strip():
            yield (
                f"spec.tools: {tool.schema.name} has no description, so that the model learns only its name; add a "
                "docstring that says what it does"
            )


def unresolved(entry: ToolEntry) -> tuple[str, str] | None:
    """Field and host of a server that would be asked for its tools, if its name is a cluster's and not known here."""
    if entry.mcp is not None and entry.mcp.url is not None:
        field, url = "mcp.url", entry.mcp.url
    elif entry.http is not None and "://" in (entry.http.openapi or ""):
        field, url = "http.openapi", entry.http.openapi or ""
    else:
        return None
    server = server_at(url, field)
    if not is_cluster_name(server.host):
        return None
    try:
        socket.getaddrinfo(server.host, server.port)
    except OSError:
        return field, server.host
    return None


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
