"""References within a JSON Schema, followed where a value's type decides how text is read. Nothing is retrieved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from kestrl.tools.shapes import is_list, is_mapping

DEEPEST = 8
"""Maximum references, and levels of `allOf`, `anyOf` and `oneOf`, that are followed."""


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with the members of what its `$ref` names, its own first; empty for what is no schema of members.

    Args:
        schema: A part of `root`.
        root: The schema in which references are looked up, by JSON pointers such as `#/$defs/Place`.
    """
    members: dict[str, Any] = {}
    for _ in range(DEEPEST):
        if not is_mapping(schema):
            break
        members = {**schema, **members}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        schema = _pointed(reference, root)
    members.pop("$ref", None)
    return members


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties that a schema declares, also by reference and in `allOf`, `anyOf` and `oneOf`."""
    return _properties(schema, schema, DEEPEST)


def _properties(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    members = resolved(schema, root)
    if not members or depth == 0:
        return {}
    found: dict[str, Any] = {}
    for key in ("allOf", "anyOf", "oneOf"):
        parts = members.get(key)
        for part in parts if is_list(parts) else ():
            found |= _properties(part, root, depth - 1)
    own = members.get("properties")
    return found | (dict(own) if is_mapping(own) else {})


def _pointed(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that a JSON pointer names; None if there is none."""
    if not reference.startswith("#"):
        return None
    part: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if is_mapping(part):
            part = part.get(name)
        elif is_list(part) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part
