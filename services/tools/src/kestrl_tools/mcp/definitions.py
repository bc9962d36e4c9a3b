"""What an MCP server lists: untrusted text, checked, bounded, and pinned."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kestrl.errors import UserInputError
from kestrl.tools import ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.provider import ToolDefinition, digest

# The stubs leave most types of the library unknown.
jsonschema: Any = import_module("jsonschema")
MAX_TOOLS = 256
MAX_DESCRIPTION = 4096
"""Maximum characters of a description; longer ones are cut, with a marker."""
MAX_SCHEMA = 65_536
"""Maximum characters of a schema as JSON."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Control characters, and invisible ones that hide text from a person who reads it. A chat template's control strings
are not among them: the rollout worker never encodes a description as control tokens."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool as the server lists it."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def visible(text: str) -> str:
    """Text without control and invisible characters."""
    return CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def definitions(server: str, listed: Sequence[Listed], wanted: Sequence[str] | None) -> list[ToolDefinition]:
    """The offered tools, in the order of their names, so that the order of the server's list has no effect.

    Args:
        server: Name of the server, for messages.
        listed: What it lists.
        wanted: The manifest's selection; None for all.

    Raises:
        UserInputError: A tool is missing or cannot be offered; the message begins with the rest of the field.
    """
    by_name = {tool.name: tool for tool in listed}
    missing = sorted(set(wanted or ()) - set(by_name))
    if missing:
        known = ", ".join(sorted(by_name)) or "none"
        raise UserInputError(f"tools: {server} has no tool {', '.join(missing)} (it has: {known})")
    chosen = sorted(by_name if wanted is None else wanted)
    if len(chosen) > MAX_TOOLS:
        raise UserInputError(f"mcp: {server} has {len(chosen)} tools; select at most {MAX_TOOLS} by `tools`")
    return [_definition(by_name[name]) for name in chosen]


def _definition(tool: Listed) -> ToolDefinition:
    if not NAME.fullmatch(tool.name):
        raise UserInputError(
            f"mcp: the tool {tool.name[:80]!r} has a name that models cannot call ({NAME.pattern}); select others by "
            "`tools`"
        )
    parameters: dict[str, Any] = {"type": "object", "properties": {}, **_cleaned(tool.parameters)}
    parameters.pop("$schema", None)
    if parameters["type"] != "object" or len(json.dumps(parameters)) > MAX_SCHEMA:
        raise UserInputError(
            f"mcp: the schema of {tool.name} is not one of type object with at most {MAX_SCHEMA} characters; select "
            "others by `tools`"
        )
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise UserInputError(
            f"mcp: the schema of {tool.name} is not a JSON Schema ({error.message[:200]}); select others by `tools`"
        ) from error
    text = visible(tool.description)
    if len(text) > MAX_DESCRIPTION:
        text = f"{text[:MAX_DESCRIPTION]} [cut]"
    return ToolDefinition(
        schema=ToolSchema(name=tool.name, description=text, parameters=parameters),
        arguments=Arguments(parameters),
        fillable=frozenset(parameters["properties"]) if parameters.get("additionalProperties") is False else None,
    )


def _cleaned(value: Any) -> Any:
    """A JSON value with visible text only; keys stay as they are, since they name arguments."""
    if isinstance(value, str):
        return visible(value)[:MAX_DESCRIPTION]
    if isinstance(value, list):
        return [_cleaned(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Mapping):
        return {key: _cleaned(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def differences(before: Sequence[ToolDefinition], after: Sequence[ToolDefinition]) -> str:
    """What changed between two lists, for a message."""
    old, new = ({tool.name: digest([tool]) for tool in tools} for tools in (before, after))
    parts = {
        "removed": sorted(set(old) - set(new)),
        "added": sorted(set(new) - set(old)),
        "changed": sorted(name for name in set(old) & set(new) if old[name] != new[name]),
    }
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names)
