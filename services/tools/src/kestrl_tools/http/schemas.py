"""JSON Schemas of an OpenAPI document as schemas of their own: references are replaced by what they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrl.tools.json_schema import SchemaInvalid, pattern_size
from kestrl.tools.shapes import is_list, is_mapping
from kestrl_tools.http.document import Document, Unsupported

MAX_PARTS = 5000
"""Maximum schemas within the schemas of an operation, with references replaced."""
MAX_DEPTH = 64
VALUES = frozenset(
    {"type", "enum", "const", "title", "description", "default", "format", "pattern", "multipleOf"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "required"}
    | {"minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties"}
    | {"dependentRequired"}
)
"""Keywords whose values are kept as they are."""
ONE = frozenset(
    {"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords whose value is a schema."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""
MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
"""Keywords whose value is a map of schemas."""
REFUSED = frozenset({"$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"})
"""Keywords that change what references mean. All other keywords say nothing about values and are left out."""


class Schemas:
    """Converts the schemas of one operation."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._parts = 0

    def converted(self, schema: Any, references: tuple[str, ...] = (), depth: int = 0) -> Any:
        """A JSON Schema (2020-12) without references. Properties that are read-only are left out.

        Raises:
            Unsupported: A reference leads out of the document or to itself, or the schema is too large.
        """
        if isinstance(schema, bool):
            return schema
        if not is_mapping(schema):
            raise Unsupported("a schema is not an object")
        self._count(depth)
        if "$ref" in schema:
            return self._referenced(schema, references, depth)
        converted_schema: dict[str, Any] = {}
        for key, value in schema.items():
            self._add(converted_schema, str(key), value, references, depth + 1)
        self._leave_out_read_only(converted_schema, schema)
        return _from_3_0(converted_schema, schema) if self._document.before_3_1 else converted_schema

    def _count(self, depth: int) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS or depth > MAX_DEPTH:
            raise Unsupported(f"its schemas have more than {MAX_PARTS} parts or {MAX_DEPTH} levels")

    def _value(self, value: Any, depth: int) -> Any:
        """A value that is kept, counted, since aliases of YAML can make one without end."""
        self._count(depth)
        if is_mapping(value):
            return {str(key): self._value(item, depth + 1) for key, item in value.items()}
        if is_list(value):
            return [self._value(item, depth + 1) for item in value]
        if not isinstance(value, str | int | float | None):
            raise Unsupported(f"its schema has a {type(value).__name__}, which JSON does not have")
        return value

    def _referenced(self, schema: Mapping[str, Any], references: tuple[str, ...], depth: int) -> Any:
        reference = str(schema["$ref"])
        if reference in references:
            raise Unsupported(f"its schema contains itself by {reference}")
        target = self.converted(self._document.resolve(reference), (*references, reference), depth + 1)
        beside = {} if self._document.before_3_1 else {key: value for key, value in schema.items() if key != "$ref"}
        if not beside:
            return target
        added = self.converted(beside, references, depth + 1)
        if not added:
            return target
        if is_mapping(target) and not set(target) & (set(added) - {"description", "title", "default"}):
            return {**target, **added}
        return {"allOf": [target, added]}

    def _add(self, target: dict[str, Any], key: str, value: Any, references: tuple[str, ...], depth: int) -> None:
        if key in REFUSED:
            raise Unsupported(f"its schema has {key}")
        if key in VALUES:
            target[key] = self._value(value, depth)
        elif key in ONE:
            target[key] = self.converted(value, references, depth)
        elif key in LISTS and is_list(value):
            target[key] = [self.converted(item, references, depth) for item in value]
        elif key in MAPS and is_mapping(value):
            target[key] = {name: self.converted(item, references, depth) for name, item in value.items()}
        if key == "required" and not (is_list(value) and all(isinstance(name, str) for name in value)):
            raise Unsupported("its schema has a `required` that is not a list of names")
        if key == "pattern":
            _check_pattern(value)

    def _leave_out_read_only(self, target: dict[str, Any], schema: Mapping[str, Any]) -> None:
        properties: Any = schema.get("properties")
        if not is_mapping(properties):
            return
        for name, value in properties.items():
            if is_mapping(value) and self._document.at(value).get("readOnly") is True:
                del target["properties"][name]
                if name in target.get("required", ()):
                    target["required"] = [
                        required_name for required_name in target["required"] if required_name != name
                    ]


def _check_pattern(pattern: object) -> None:
    try:
        pattern_size(str(pattern))
    except SchemaInvalid as error:
        raise Unsupported(str(error)) from error


def _from_3_0(target: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of OpenAPI 3.0 that JSON Schema writes in another way."""
    for limit, name in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(target.get(name), bool) and target.pop(name) and limit in target:
            target[name] = target.pop(limit)
    if schema.get("nullable") is not True:
        return target
    if not isinstance(target.get("type"), str):
        return {"anyOf": [target, {"type": "null"}]}
    target["type"] = [target["type"], "null"]
    if is_list(target.get("enum")) and None not in target["enum"]:
        target["enum"] = [*target["enum"], None]
    return target
