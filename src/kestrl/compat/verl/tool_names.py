"""Names of verl's tools: schemas, `BaseTool` and function tools, with the signatures of verl 0.9.1."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from kestrl.errors import UserCodeError
from kestrl.tools.shapes import is_mapping


class ToolResponse(BaseModel):
    """Result of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether the response is empty."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Whether the response is only text."""
        return bool(self.text) and not self.image and not self.video


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter; further keywords of JSON Schema are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call with its arguments as JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments are not a JSON object."""
        try:
            arguments: Any = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        call_arguments = dict[str, Any](arguments) if is_mapping(arguments) else None
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=call_arguments or {}), call_arguments is None


class OpenAIFunctionToolCall(BaseModel):
    """A call with its identifier."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class BaseTool:
    """Base class of tools for verl."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The tool's own schema, where none is configured."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: give `tool_schema` or override get_openai_tool_schema"
            )
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Creates an instance."""
        del kwargs
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the tool."""
        del instance_id, parameters, kwargs
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The tool's own reward."""
        del instance_id, kwargs
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


def initialize_tools_from_config(*args: Any, **options: Any) -> list[Any]:
    """Raises an error: tools are listed in the manifest."""
    del args, options
    raise UserCodeError(
        "the loop reads tools from a file of verl's; list them in the manifest's `tools`, and take them from `tools` "
        "of the "
        "constructor",
        code="unsupported_tools",
    )


@dataclass
class FunctionTool:
    """A registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: Any = None
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Calls it."""
        return await self.fn(**parameters) if self.is_async else await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Registered functions by name. The manifest references the function itself; its return value is read as in verl."""


def function_tool(name: str | Callable[..., Any] | None = None, *, schema: Any = None) -> Any:
    """Registers a function; usable with and without parentheses."""

    def register_function(function: Callable[..., Any], called: str | None) -> Callable[..., Any]:
        entry = FunctionTool(called or function.__name__, function, schema, inspect.iscoroutinefunction(function))
        FUNCTION_TOOL_REGISTRY[entry.name] = entry
        return function

    if callable(name):
        return register_function(name, None)

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        return register_function(function, name)

    return decorator


def get_function_tool(name: str) -> FunctionTool:
    """A registered function."""
    return FUNCTION_TOOL_REGISTRY[name]


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Response, reward and metrics from the return value of a function.

    Raises:
        TypeError: A tuple of another length than 1 to 3.
    """
    parts = ret if _is_tuple(ret) else (ret,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a function tool returns 1 to 3 values, this returned {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    return _response(response), float(reward or 0.0), dict(metrics or {})


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    return ToolResponse(text=json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))
