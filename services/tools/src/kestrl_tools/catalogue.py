"""The job's tools, loaded when the service starts: whatever is wrong with one is told then, by manifest field."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kestrl.errors import ToolFailure, UserInputError
from kestrl.importing import load
from kestrl.plan.settings import ToolEntry
from kestrl.tools import ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.schema import read
from kestrl.tools.verl import VerlTool, is_verl_tool
from kestrl_tools.instances import Instance, PlainInstance, VerlInstance, is_async
from kestrl_tools.lanes import Lanes

Kwargs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of the job."""

    schema: ToolSchema
    arguments: Arguments
    make: Callable[[Kwargs], Awaitable[Instance]]
    """From `create_kwargs` to the session's instance. Raises ToolFailure for kwargs that it does not take."""
    fillable: frozenset[str] | None
    """What `execute_kwargs` may name; None takes anything."""
    required: frozenset[str]
    """What they must name."""

    def check_fill(self, execute_kwargs: Kwargs) -> None:
        """Whether the scenario's `execute_kwargs` fit.

        Raises:
            ToolFailure: They do not.
        """
        unknown = [] if self.fillable is None else sorted(set(execute_kwargs) - self.fillable)
        if unknown:
            raise _kwargs_failure(self.schema.name, "execute_kwargs", f"it has no parameter {', '.join(unknown)}")
        missing = sorted(self.required - set(execute_kwargs))
        if missing:
            raise _kwargs_failure(
                self.schema.name, "execute_kwargs", f"{', '.join(missing)} is hidden from the model and must be given"
            )


def _kwargs_failure(tool: str, which: str, reason: str) -> ToolFailure:
    return ToolFailure(f"{tool}: the row's {which} do not fit: {reason}", code="tool_kwargs_invalid")


def load_tools(entries: Sequence[ToolEntry], lanes: Lanes) -> dict[str, Tool]:
    """Every tool by name, in manifest order.

    Raises:
        UserInputError: Some cannot be used; one line each, naming the field and the mend.
    """
    tools: dict[str, Tool] = {}
    problems: list[str] = []
    for index, entry in enumerate(entries):
        try:
            tools[entry.name] = _tool(entry, f"spec.tools[{index}]", lanes)
        except UserInputError as error:
            problems.append(str(error))
    if problems:
        raise UserInputError("\n".join(problems))
    return tools


def _tool(entry: ToolEntry, field: str, lanes: Lanes) -> Tool:
    obj = load(entry.use, field=f"{field}.use")
    try:
        if is_verl_tool(obj):
            return _verl(obj, entry)
        return _class(obj, entry, lanes) if inspect.isclass(obj) else _function(obj, entry, lanes)
    except UserInputError as error:
        raise UserInputError(f"{field}.use: {entry.use}: {error}") from error


def _function(obj: Any, entry: ToolEntry, lanes: Lanes) -> Tool:
    described = read(obj, entry.name, fixed=tuple(entry.config))
    _bind(obj, entry)
    target = partial(obj, **entry.config) if entry.config else obj

    async def make(create_kwargs: Kwargs) -> Instance:
        if create_kwargs:
            raise _kwargs_failure(entry.name, "create_kwargs", "it is a function; only a class is made for an episode")
        instance = PlainInstance(entry.name, lanes, sync=not is_async(obj))
        instance.use(target)
        return instance

    return Tool(
        schema=described.schema,
        arguments=described.arguments,
        make=make,
        fillable=described.fillable,
        required=described.required,
    )


def _class(cls: type, entry: ToolEntry, lanes: Lanes) -> Tool:
    described = read(cls, entry.name)
    _bind(cls, entry)

    async def make(create_kwargs: Kwargs) -> Instance:
        kwargs = {**entry.config, **create_kwargs}
        try:
            inspect.signature(cls).bind(**kwargs)
        except TypeError as error:
            raise _kwargs_failure(entry.name, "create_kwargs", f"{cls.__name__}: {error}") from error
        instance = PlainInstance(entry.name, lanes, sync=not is_async(cls))
        try:
            await instance.make(partial(cls, **kwargs))
        except BaseException:
            await instance.close()  # ends its thread
            raise
        return instance

    return Tool(
        schema=described.schema,
        arguments=described.arguments,
        make=make,
        fillable=described.fillable,
        required=described.required,
    )


def _verl(cls: type, entry: ToolEntry) -> Tool:
    tool = VerlTool(cls, entry.config)
    schema = tool.schema(entry.name)

    async def make(create_kwargs: Kwargs) -> Instance:
        return VerlInstance(tool, await tool.create(create_kwargs))

    return Tool(schema=schema, arguments=Arguments(schema.parameters), make=make, fillable=None, required=frozenset())


def _bind(obj: Any, entry: ToolEntry) -> None:
    """Whether the manifest's `config` fits; what a scenario's `create_kwargs` add is not known yet."""
    try:
        inspect.signature(obj).bind_partial(**entry.config)
    except TypeError as error:
        raise UserInputError(f"its config does not fit: {error}") from error
