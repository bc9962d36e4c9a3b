"""Support for classes written for verl's `BaseTool`. They are recognised by their methods, so verl need not be
installed.

The manifest's `config` has the entries of verl's tool file: `config` (for the constructor) and `tool_schema` (in
OpenAI's form), unless the class implements `get_openai_tool_schema`. One object serves the job, as in verl; its
instance is created when the session opens and released when it closes (verl creates and releases one for each call, so
that no state is kept between calls). The step reward and the metrics that `execute` returns are available to rewards as
`ToolCall.data`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from kestrl.compat.verl import tool_names
from kestrl.errors import UserInputError, described
from kestrl.tools import ToolResult, ToolSchema

METHODS = ("create", "execute", "release")


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = ""
    description: str = ""
    parameters: Any = None


class _FunctionTool(BaseModel):
    """Provides the attributes and `model_dump` of verl's `OpenAIFunctionToolSchema`."""

    model_config = ConfigDict(extra="allow")
    type: str = "function"
    function: _Function


def is_verl_tool(obj: Any) -> bool:
    """Whether a class is written for verl."""
    return inspect.isclass(obj) and all(inspect.iscoroutinefunction(getattr(obj, name, None)) for name in METHODS)


class VerlTool:
    """A tool class for verl, constructed once for the job."""

    def __init__(self, cls: type, config: Mapping[str, Any]) -> None:
        """Constructs it.

        Raises:
            UserInputError: `config` is not valid for such a tool, or its constructor raised.
        """
        unknown = sorted(set(config) - {"config", "tool_schema"})
        if unknown:
            raise UserInputError(
                f"{cls.__name__} is written for verl: its settings go under `config`, its schema under `tool_schema`; "
                f"{', '.join(unknown)} would be ignored"
            )
        tool_schema = config.get("tool_schema")
        try:
            schema = None if tool_schema is None else _FunctionTool.model_validate(tool_schema)
            self._tool: Any = cls(config=dict(config.get("config") or {}), tool_schema=schema)
        except ValidationError as error:
            raise UserInputError(
                f"tool_schema is not of the form {{type, function: {{name, ...}}}}: {error}"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise UserInputError(f"{cls.__name__} cannot be made: {described(error)}") from error
        self._own: Any = schema if schema is not None else getattr(self._tool, "tool_schema", None)
        if self._own is None:
            raise UserInputError(f"{cls.__name__} brings no schema of its own: give `tool_schema`")

    def schema(self, name: str) -> ToolSchema:
        """Schema for the model, under the name in the manifest."""
        dumped: Any = (
            self._own if isinstance(cast(object, self._own), Mapping) else self._own.model_dump(exclude_none=True)
        )
        function: Mapping[str, Any] = dumped["function"]
        parameters: Mapping[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
        return ToolSchema(name=name, description=function.get("description", ""), parameters=parameters)

    async def create(self, create_kwargs: Mapping[str, Any]) -> str:
        """Creates an instance and returns its id. Older classes take keyword arguments and return only the id."""
        parameters = inspect.signature(self._tool.create).parameters
        by_name = {key: value for key, value in create_kwargs.items() if key in parameters and key != "instance_id"}
        id_or_pair: Any = await self._tool.create(**{"create_kwargs": dict(create_kwargs), **by_name})
        pair: Any = id_or_pair
        return str(pair[0] if isinstance(id_or_pair, tuple) else id_or_pair)

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> ToolResult:
        """Calls it."""
        response, reward, metrics = await self._tool.execute(instance_id, dict(arguments), **filled)
        if isinstance(response, Mapping):
            text: Any = cast(Mapping[str, Any], response).get("text")
        else:
            text = response if isinstance(response, str) else response.text
        return ToolResult(text=text or "", data={"tool_reward": reward, "tool_metrics": metrics or {}})

    async def release(self, instance_id: str) -> None:
        await self._tool.release(instance_id)


def is_function_tool(obj: Any) -> bool:
    """Whether a function is registered with verl's `function_tool`."""
    return any(entry.fn is obj for entry in tool_names.FUNCTION_TOOL_REGISTRY.values())


def function_result(returned: Any) -> ToolResult:
    """Converts the return value of such a function to a `ToolResult`."""
    response, reward, metrics = tool_names.normalize_function_tool_return(returned)
    return ToolResult(text=response.text or "", data={"tool_reward": reward, "tool_metrics": metrics})


def adapt_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function so that it returns `ToolResult`s."""
    if inspect.iscoroutinefunction(function):

        async def run(*args: Any, **options: Any) -> ToolResult:
            return function_result(await function(*args, **options))

        return run
    return lambda *args, **options: function_result(function(*args, **options))
