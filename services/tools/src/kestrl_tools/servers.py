"""What a server lists: untrusted text, checked, bounded, and pinned."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kestrl._shared.plan.settings.tools import SecretText
from kestrl.errors import KestrlError, UserInputError
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


class ServerUnavailable(KestrlError):
    """The server cannot be reached, or ended during a call: an error of the infrastructure. A retry may succeed."""

    code = "tool_server_unavailable"
    retryable = True


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool as the server lists it."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def secret_text(kind: str, text: SecretText) -> str:
    """A text with the entry of a secret; `kind` is as for `chosen`.

    Raises:
        UserInputError: The variable of the entry is not set.
    """
    value = os.environ.get(text.variable)
    if value is None:
        raise UserInputError(f"{kind}: {text.variable} is not set, which holds an entry of a secret of the manifest")
    return text.prefix + value


def visible(text: str) -> str:
    """Text without control and invisible characters."""
    return CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def chosen(kind: str, server: str, names: Collection[str], wanted: Sequence[str] | None) -> list[str]:
    """Names of the offered tools, sorted, so that the order of the server's list has no effect.

    Args:
        kind: Kind of the server: its field in the manifest.
        server: Name of the server, for messages.
        names: Names that it lists.
        wanted: The manifest's selection; None for all.

    Raises:
        UserInputError: A tool is missing, or there are too many; the message begins with the rest of the field.
    """
    missing = sorted(set(wanted or ()) - set(names))
    if missing:
        known = ", ".join(sorted(names)) or "none"
        raise UserInputError(f"tools: {server} has no tool {', '.join(missing)} (it has: {known})")
    found = sorted(names if wanted is None else wanted)
    if len(found) > MAX_TOOLS:
        raise UserInputError(f"{kind}: {server} has {len(found)} tools; select at most {MAX_TOOLS} by `tools`")
    return found


def definitions(kind: str, server: str, listed: Sequence[Listed], wanted: Sequence[str] | None) -> list[ToolDefinition]:
    """The offered tools, in the order of their names; arguments as for `chosen`.

    Raises:
        UserInputError: A tool is missing or cannot be offered; the message begins with the rest of the field.
    """
    by_name = {tool.name: tool for tool in listed}
    return [_definition(kind, by_name[name]) for name in chosen(kind, server, by_name, wanted)]


def _definition(kind: str, tool: Listed) -> ToolDefinition:
    if not NAME.fullmatch(tool.name):
        raise UserInputError(
            f"{kind}: the tool {tool.name[:80]!r} has a name that models cannot call ({NAME.pattern}); select others "
            "by `tools`"
        )
    parameters: dict[str, Any] = {"type": "object", "properties": {}, **_cleaned(tool.parameters)}
    parameters.pop("$schema", None)
    if parameters["type"] != "object" or len(json.dumps(parameters)) > MAX_SCHEMA:
        raise UserInputError(
            f"{kind}: the schema of {tool.name} is not one of type object with at most {MAX_SCHEMA} characters; select "
            "others by `tools`"
        )
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise UserInputError(
            f"{kind}: the schema of {tool.name} is not a JSON Schema ({error.message[:200]}); select others by `tools`"
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
