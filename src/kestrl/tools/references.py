"""References within a JSON Schema, followed where a value's type decides how text is read. Nothing is retrieved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from kestrl.tools.shapes import is_list, is_mapping

DEEPEST = 8
"""Maximum references, and levels of `allOf`, `anyOf` and `oneOf`, that are followed."""
MAX_ALTERNATIVES = 1000
"""Maximum schemas that are looked at for one value."""


class ReferenceInvalid(ValueError):
    """A reference leads out of the document, or names nothing; the message says which."""


def pointed(reference: object, root: Any) -> Any:
    """The part of a document that a JSON pointer such as `#/$defs/Place` names.

    Raises:
        ReferenceInvalid: The reference leads out of the document, or names nothing.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ReferenceInvalid(f"the reference {str(reference)[:200]!r} is not into the document itself")
    part: Any = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if is_mapping(part) and name in part:
            part = part[name]
        elif is_list(part) and name.isascii() and name.isdigit() and len(name) < 10 and int(name) < len(part):
            part = part[int(name)]
        else:
            raise ReferenceInvalid(f"the reference {reference[:200]} names nothing")
    return part


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with the members of what its `$ref` names, its own first; empty for what is no schema of members.

    Args:
        schema: A part of `root`.
        root: The schema in which references are looked up.
    """
    members: dict[str, Any] = {}
    for _ in range(DEEPEST):
        if not is_mapping(schema):
            break
        members = {**schema, **members}
        if not isinstance(schema.get("$ref"), str):
            break
        try:
            schema = pointed(schema["$ref"], root)
        except ReferenceInvalid:
            break
    members.pop("$ref", None)
    return members


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that may say something of the same value: the schema with its references resolved, and what its
    `allOf`, `anyOf` and `oneOf` have. Each part of the document once, so that parts that name each other end.
    """
    level, seen_ids = [schema], set[int]()
    for _ in range(DEEPEST + 1):
        next_level: list[Any] = []
        for alternative in level:
            if id(alternative) in seen_ids or len(seen_ids) >= MAX_ALTERNATIVES:
                continue
            seen_ids.add(id(alternative))
            members = resolved(alternative, root)
            if not members:
                continue
            yield members
            for key in ("allOf", "anyOf", "oneOf"):
                parts = members.get(key)
                next_level += parts if is_list(parts) else []
        level = next_level


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties that a schema declares, also by reference and in `allOf`, `anyOf` and `oneOf`."""
    properties: dict[str, Any] = {}
    for members in alternatives(schema, schema):
        declared = members.get("properties")
        properties = {**(declared if is_mapping(declared) else {}), **properties}
    return properties
