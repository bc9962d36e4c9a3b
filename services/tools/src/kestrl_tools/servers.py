"""What a server lists: untrusted text, checked, bounded, and pinned."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrl._shared.credentials import header_value
from kestrl._shared.plan.settings.tools import SecretText, ToolEntry
from kestrl._shared.user_secrets import user_secret
from kestrl.errors import KestrlError, UserInputError
from kestrl.tools import ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.json_schema import SchemaInvalid
from kestrl.tools.provider import ToolDefinition, digest
from kestrl.tools.schema_graph import MAX_NESTING
from kestrl.tools.shapes import is_list, is_mapping, json_problem

log = logging.getLogger(__name__)
MAX_TOOLS = 256
MAX_NAME = 64
MAX_REASONS = 5
"""Maximum tools whose reasons are in one message."""
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


class ToolUnsupported(ValueError):
    """A tool cannot be offered; the message says why."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as the server lists it."""

    name: str
    """Name for the model, as `callable_name` makes it."""
    description: str
    parameters: Mapping[str, Any]
    call_name: str = ""
    """Name by which the server knows it."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the manifest leaves out of a server's tools."""

    excluded: frozenset[str] = frozenset()
    """Names of tools that are not offered."""
    unsupported: bool = False
    """Whether tools that cannot be offered are left out; else they are refused."""


NOTHING_LEFT_OUT = LeftOut()


def left_out_by(entry: ToolEntry) -> LeftOut:
    """What an entry of the manifest leaves out."""
    return LeftOut(frozenset(entry.exclude), entry.unsupported == "skip")


def callable_name(text: str) -> str:
    """A name that models can call: `_` for what it cannot have."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")
    name = name if NAME.match(name) else f"_{name}"
    return name[:MAX_NAME]


def secret_text(kind: str, text: SecretText) -> str:
    """A text with the present entry of a secret; `kind` is as for `chosen`.

    Raises:
        UserInputError: The variable of the entry is not set.
    """
    value = user_secret(text.variable)
    if value is None:
        raise UserInputError(f"{kind}: {text.variable} is not set, which holds an entry of a secret of the manifest")
    return text.prefix + value


def secret_header(kind: str, text: SecretText) -> str:
    """As `secret_text`, of a value that can be sent as a header.

    Raises:
        UserInputError: As `secret_text`, and for a value that a header cannot hold.
    """
    return header_value(secret_text(kind, text), f"{kind}: {text.variable}")


def visible(text: str) -> str:
    """Text without control and invisible characters."""
    return CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def chosen(
    kind: str,
    server: str,
    names: Collection[str],
    selection: Sequence[str] | None,
    left_out: LeftOut = NOTHING_LEFT_OUT,
) -> list[str]:
    """Names of the offered tools, sorted, so that the order of the server's list has no effect.

    Args:
        kind: Kind of the server: its field in the manifest.
        server: Name of the server, for messages.
        names: Names that it lists.
        selection: The manifest's selection; None for all.
        left_out: What the manifest leaves out.

    Raises:
        UserInputError: A tool is missing, or there are too many; the message begins with the rest of the field.
    """
    for field, mentioned in (("tools", selection or ()), ("exclude", left_out.excluded)):
        if unknown := sorted(set(mentioned) - set(names)):
            listing = ", ".join(sorted(names)) or "none"
            raise UserInputError(f"{field}: {server} has no tool {', '.join(unknown)} (it has: {listing})")
    offered = sorted(set(names if selection is None else selection) - left_out.excluded)
    if len(offered) > MAX_TOOLS:
        raise UserInputError(f"{kind}: {server} has {len(offered)} tools; select at most {MAX_TOOLS} by `tools`")
    return offered


def definitions(
    kind: str,
    server: str,
    tools: Sequence[ListedTool],
    selection: Sequence[str] | None,
    left_out: LeftOut = NOTHING_LEFT_OUT,
) -> list[ToolDefinition]:
    """The offered tools, in the order of their names; arguments as for `chosen`.

    Raises:
        UserInputError: A tool is missing or cannot be offered; the message begins with the rest of the field.
    """
    by_name: dict[str, list[ListedTool]] = {}
    for tool in tools:
        by_name.setdefault(tool.name, []).append(tool)
    offered: list[ToolDefinition] = []
    reasons: list[str] = []
    for name in chosen(kind, server, by_name, selection, left_out):
        try:
            offered.append(_definition(by_name[name]))
        except ToolUnsupported as error:
            reasons.append(f"the tool {name} cannot be offered: {error}")
    refuse(kind, server, reasons, left_out)
    return offered


def refuse(field: str, server: str, reasons: Sequence[str], left_out: LeftOut) -> None:
    """Refuses tools that cannot be offered, or logs them where the manifest leaves them out.

    Raises:
        UserInputError: There are some; the message begins with the rest of the field.
    """
    if not reasons:
        return
    remainder = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
    text = f"{'; '.join(reasons[:MAX_REASONS])}{remainder}"
    if not left_out.unsupported:
        raise UserInputError(
            f"{field}: {text}; select others by `tools`, or leave them out by `exclude` or `unsupported: skip`"
        )
    log.warning("%s: left out (unsupported: skip): %s", server, text)


def _definition(namesakes: Sequence[ListedTool]) -> ToolDefinition:
    tool, *duplicates = namesakes
    if duplicates:
        raise ToolUnsupported(f"the server lists {len(namesakes)} tools that would be called so")
    if problem := json_problem(tool.parameters, MAX_NESTING):
        raise ToolUnsupported(f"its schema is not JSON: {problem}")
    parameters: dict[str, Any] = {"type": "object", "properties": {}, **_cleaned(tool.parameters)}
    dialect = parameters.pop("$schema", None)
    size = len(json.dumps(parameters))
    if parameters["type"] != "object" or size > MAX_SCHEMA:
        raise ToolUnsupported(f"its schema is not one of type object with at most {MAX_SCHEMA} characters")
    try:
        arguments = Arguments(parameters, dialect=dialect)
    except SchemaInvalid as error:
        raise ToolUnsupported(f"its schema is not a JSON Schema that can be checked: {error}") from error
    text = visible(tool.description)
    if len(text) > MAX_DESCRIPTION:
        text = f"{text[:MAX_DESCRIPTION]} [cut]"
    return ToolDefinition(
        schema=ToolSchema(name=tool.name, description=text, parameters=parameters),
        arguments=arguments,
        fillable=frozenset(parameters["properties"]) if parameters.get("additionalProperties") is False else None,
    )


def _cleaned(value: Any) -> Any:
    """A JSON value with visible text only; keys stay as they are, since they name arguments."""
    if isinstance(value, str):
        return visible(value)[:MAX_DESCRIPTION]
    if is_list(value):
        return [_cleaned(item) for item in value]
    if is_mapping(value):
        return {key: _cleaned(subschema) for key, subschema in value.items()}
    return value


def differences(before: Sequence[ToolDefinition], after: Sequence[ToolDefinition]) -> str:
    """What changed between two lists, for a message."""
    old, new = ({tool.name: digest([tool]) for tool in tools} for tools in (before, after))
    parts = {
        "removed": sorted(set(old) - set(new)),
        "added": sorted(set(new) - set(old)),
        "changed": sorted(name for name in set(old) & set(new) if old[name] != new[name]),
    }
    return "; ".join(f"{change} {', '.join(names)}" for change, names in parts.items() if names)
