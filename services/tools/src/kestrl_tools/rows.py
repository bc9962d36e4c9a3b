"""What a row of data sets for the tools: names, `create_kwargs` and `execute_kwargs`, checked without making a tool."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from kestrl._shared.environments import reset_arguments
from kestrl._shared.plan.tools import NO_FILES, with_paths
from kestrl._shared.spec.scalars import PinnedFile
from kestrl.episode import Scenario
from kestrl.errors import ToolFailure
from kestrl.tools.provider import Kwargs
from kestrl.tools.shapes import is_mapping
from kestrl_tools.catalogue import JobTool
from kestrl_tools.environments.provider import is_environment


def check_names(tools: Mapping[str, JobTool], offered: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    """Checks that a row's names exist in the job, and that arguments have the right name.

    Args:
        tools: The tools of the job.
        offered: Names of the tools that the row offers.
        kwargs: The row's entries by name.

    Raises:
        ToolFailure: A name is unknown or has the wrong arguments.
    """
    providers = {tool.provider.name for tool in tools.values()}
    unknown = sorted((set(offered) - set(tools)) | (set(kwargs) - set(tools) - providers))
    if unknown:
        raise ToolFailure(
            f"the row names tools that the job does not have: {', '.join(unknown)} "
            f"(it has: {', '.join(tools) or 'none'})",
            code="unknown_tool",
        )
    for name in kwargs:
        if given(kwargs, name, "create_kwargs") and name not in providers:
            environment = tools[name].provider.name
            raise ToolFailure(
                f"{name}: create_kwargs belong under the name of its environment, {environment!r}",
                code="tool_kwargs_invalid",
            )
        if given(kwargs, name, "execute_kwargs") and name not in tools:
            raise ToolFailure(
                f"{name}: execute_kwargs belong under the name of a tool, not of its environment",
                code="tool_kwargs_invalid",
            )


def row_kwargs(tools: Mapping[str, JobTool], scenario: Scenario) -> Mapping[str, Any]:
    """What a row sets by name; the environment of the job is reset with its columns, as the worker does."""
    name = next((tool.provider.name for tool in tools.values() if is_environment(tool.provider)), None)
    if name is None:
        return scenario.tools_kwargs
    return {name: {"create_kwargs": reset_arguments(scenario)}}


def placed(
    kwargs: Mapping[str, Any], files: Mapping[str, str] = NO_FILES, absent: Collection[str] = ()
) -> Mapping[str, Any]:
    """What a row sets, with paths in place of the uris of files.

    Args:
        kwargs: The row's entries by name.
        files: Paths by uri.
        absent: Uris of files that a check does not have.

    Raises:
        ToolFailure: A row names a file that the manifest does not list.
    """
    uris = {*files, *absent}
    return {name: _placed(name, entry, files, uris) for name, entry in kwargs.items()}


def _placed(name: str, entry: Any, files: Mapping[str, str], uris: Collection[str]) -> Any:
    if not is_mapping(entry):
        return entry
    changed: dict[str, Any] = {}
    for which, arguments in entry.items():
        for argument in arguments.values() if is_mapping(arguments) else ():
            if isinstance(argument, str) and argument not in uris and PinnedFile.read(argument) is not None:
                raise ToolFailure(
                    f"{name}: {argument} is not one of spec.data.files; list it there, with its size",
                    code="tool_kwargs_invalid",
                )
        changed[str(which)] = with_paths(arguments, files) if is_mapping(arguments) else arguments
    return changed


def check_row(tools: Mapping[str, JobTool], selection: Sequence[str] | None, kwargs: Mapping[str, Any]) -> None:
    """Checks all that a row sets for the tools that it offers, against their signatures.

    Args:
        tools: The tools of the job.
        selection: Names of tools and environments that the row offers; None means all.
        kwargs: The row's entries by name.

    Raises:
        ToolFailure: A name is unknown, or arguments do not fit.
    """
    offered = [
        tool
        for tool in tools.values()
        if selection is None or not {tool.schema.name, tool.provider.name}.isdisjoint(selection)
    ]
    check_names(tools, [tool.schema.name for tool in offered], kwargs)
    for tool in offered:
        tool.definition.check_fill(given(kwargs, tool.schema.name, "execute_kwargs"))
        tool.provider.check(given(kwargs, tool.provider.name, "create_kwargs"))


def given(kwargs: Mapping[str, Any], name: str, which: str) -> Kwargs:
    """`create_kwargs` or `execute_kwargs` of a row, if any."""
    entry: Any = kwargs.get(name) or {}
    return cast(Kwargs, entry.get(which) or {})
