"""`python -m kestrl_tools.check`: checks that the job's tools can be loaded and that the rows fit them, and reports
the tools' definitions.

A server of a cluster, whose name does not resolve on this machine, is not contacted: it is a warning.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from kestrl._shared.checking import ToolsCheck, run_check
from kestrl._shared.plan.servers import is_cluster_name, server_at
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.plan.tools import with_paths
from kestrl._shared.spec.scalars import PinnedFile
from kestrl.data.rows import DataRow, read_rows
from kestrl.errors import KestrlError, ToolFailure, UserInputError, described
from kestrl.tools import ToolError
from kestrl.tools.provider import Kwargs
from kestrl_tools.catalogue import JobTool, field_of, providers_of
from kestrl_tools.environments.provider import EnvironmentProvider, is_environment, takes_turns
from kestrl_tools.lifecycle import loaded, start
from kestrl_tools.process.provider import ProcessProvider
from kestrl_tools.python_provider import PythonProvider, RowCheck
from kestrl_tools.rows import check_row, given, placed, row_kwargs
from kestrl_tools.sessions import Opening, Sessions
from kestrl_tools.tool_threads import ToolThreads

MOST_PROBLEMS = 1000
"""Maximum number of reported rows."""
CERTAIN = frozenset({"tool_result_invalid", "result_invalid", "row_changed", "row_invalid"})
"""Codes of failures that do not depend on the machine."""
TRIAL_SECONDS = 600.0
"""Lifetime of the session of a trial; the time limit of a call bounds each of its steps."""


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
    fields = [field_of(index, entry) for index, entry in entries if index not in away]
    reachable = [entry for index, entry in entries if index not in away]
    threads = ToolThreads()
    async with loaded(reachable, threads, folder=folder, fields=fields) as tools:
        for provider in filter(is_environment, providers_of(tools)):
            await start(provider)
        sessions = Sessions(
            tools, threads, call_seconds=settings.tools.call_seconds, max_sessions=1, files=settings.tools.files
        )
        trials = [trial async for trial in _trials(tools, sessions, settings.data)]
        return {
            **_found(settings, tools),
            "problems": [trial.text for trial in trials if trial.certain],
            "rewarded": sorted(_rewarded(tools)),
            "away": [settings.tools.tools[index].name for index in away],
            "warnings": [
                *_undescribed(tools),
                *(trial.text for trial in trials if not trial.certain),
                *(
                    f"spec.tools[{index}].{field}: {host} is a name of a cluster, which does not resolve here: its "
                    "tools, and what rows say of them, are not checked"
                    for index, (field, host) in away.items()
                ),
            ],
        }


class Trial(NamedTuple):
    """What the beginning and the end of an episode without a call have shown of an environment."""

    text: str
    certain: bool
    """Whether every episode has this problem; what an environment raises may be due to this machine."""


async def _trials(
    tools: Mapping[str, JobTool], sessions: Sessions, data: Mapping[str, DataSettings]
) -> AsyncGenerator[Trial]:
    """Opens and ends one session of each environment with a prompt or a reward of its own, for the first row that
    offers it. What `start_service` prepares is not made here: environments that need it are left out.
    """
    for name, names in _tried(tools).items():
        row = next(_offering(name, names, data), None)
        if row is None:
            continue
        kwargs = {
            key: entry_kwargs for key, entry_kwargs in row_kwargs(tools, row.scenario).items() if key in (name, *names)
        }
        opening = Opening(episode_id=row.place, tools=names, kwargs=kwargs, lifetime=TRIAL_SECONDS)
        try:
            await sessions.prompt(name, opening)
            await sessions.state(name)
        except ToolFailure as error:
            if error.code not in ("tool_kwargs_invalid", "kwargs_invalid"):  # reported with the row
                certain = error.code in CERTAIN
                yield Trial(f"{_field(tools, names)}: {error}", certain=certain)
        except KestrlError as error:
            yield Trial(f"{_field(tools, names)}: {name}: {error} (at {row.place})", certain=False)
        finally:
            await sessions.close(name)


def _field(tools: Mapping[str, JobTool], names: Sequence[str]) -> str:
    return "spec.environment" if is_environment(tools[names[0]].provider) else "spec.tools"


def _tried(tools: Mapping[str, JobTool]) -> dict[str, list[str]]:
    """Names of the tools of each environment that is tried."""
    environments: dict[str, list[str]] = {}
    for tool in tools.values():
        provider = tool.provider
        prepared = isinstance(provider, PythonProvider) and provider.prepared_by_service
        if (provider.has_prompt or provider.name in _rewarded(tools)) and not prepared:
            environments.setdefault(provider.name, []).append(tool.schema.name)
    return environments


def _rewarded(tools: Mapping[str, JobTool]) -> set[str]:
    """Environments with a `get_reward()`."""
    providers = (tool.provider for tool in tools.values())
    return {
        provider.name
        for provider in providers
        if isinstance(provider, PythonProvider | ProcessProvider | EnvironmentProvider) and provider.has_reward
    }


def _offering(environment: str, names: Sequence[str], data: Mapping[str, DataSettings]) -> Iterator[DataRow]:
    for file in data.values():
        for row in read_rows(Path(file.path), size=file.size, promptless=file.promptless):
            if row.scenario.tools is None or not {environment, *names}.isdisjoint(row.scenario.tools):
                yield row


def _undescribed(tools: Mapping[str, JobTool]) -> Iterator[str]:
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


def _found(settings: ToolsCheck, tools: Mapping[str, JobTool]) -> dict[str, Any]:
    return {
        "tools": [
            {
                "name": tool.schema.name,
                "description": tool.schema.description,
                "parameters": dict(tool.schema.parameters),
                "environment": tool.provider.name if tool.provider.environment else "",
            }
            for tool in tools.values()
            if not takes_turns(tool.provider, tool.schema.name)
        ],
        "rows": list(islice(chain(_misfits(tools, settings), _unusable(tools, settings)), MOST_PROBLEMS)),
    }


def _misfits(tools: Mapping[str, JobTool], settings: ToolsCheck) -> Iterator[tuple[str, str]]:
    """The agent loop of each row that does not fit, and the problem."""
    for file in settings.data.values():
        for row in read_rows(Path(file.path), size=file.size, promptless=file.promptless):
            try:
                kwargs = placed(row_kwargs(tools, row.scenario), settings.tools.files, settings.absent)
                check_row(tools, row.scenario.tools, kwargs)
            except ToolFailure as error:
                if error.code != "unknown_tool":  # the command reports names with all names of the job
                    yield row.scenario.agent, f"{row.place}: {error}"


def _unusable(tools: Mapping[str, JobTool], settings: ToolsCheck) -> Iterator[tuple[str, str]]:
    """The agent loop of each row whose `create_kwargs` a tool's own check refuses, and why; equal ones are checked once
    and reported at the first row.
    """
    checks = {
        provider.name: provider.row_check
        for provider in providers_of(tools)
        if isinstance(provider, PythonProvider) and provider.row_check is not None
    }
    checked: set[tuple[str, str]] = set()
    for file in settings.data.values() if checks else ():
        for row in read_rows(Path(file.path), size=file.size, promptless=file.promptless):
            for name, kwargs in row_kwargs(tools, row.scenario).items():
                arguments = with_paths(given({name: kwargs}, name, "create_kwargs"), settings.tools.files)
                if any(
                    isinstance(argument, str) and PinnedFile.read(argument) is not None
                    for argument in arguments.values()
                ):
                    continue  # not on this machine, which is a warning, or not listed, which is a problem of the row
                key = (name, json.dumps(arguments, sort_keys=True))
                if name not in checks or key in checked:
                    continue
                checked.add(key)
                if refusal := _refusal(checks[name], arguments):
                    yield row.scenario.agent, f"{row.place}: {name}: create_kwargs: {refusal}"


def _refusal(check: RowCheck, create_kwargs: Kwargs) -> str:
    """Why a tool's own check refuses arguments; empty if it takes them."""
    try:
        check(create_kwargs)
    except (UserInputError, ToolError, ValueError, OSError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - user code, whose mistakes are findings of a check
        return described(error)
    return ""


if __name__ == "__main__":
    run_check(ToolsCheck, check)
