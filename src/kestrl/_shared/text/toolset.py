"""Tool definitions for chat templates: every string chosen by a tool's author is replaced by a mark.

The shape of the schema and the keywords of JSON Schema remain, as templates depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl._shared.text.chat_template import mark

JSON_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose keys are names chosen by a tool's author."""
VALUES = frozenset({"default", "const", "examples", "enum"})
"""Keywords that hold values, not schemas."""
KEYWORDS = (
    NAMED
    | VALUES
    | {
        *("type", "required", "items", "prefixItems", "description", "title", "format", "pattern", "$ref"),
        *("anyOf", "oneOf", "allOf", "not", "additionalProperties", "minProperties", "maxProperties", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "minItems", "maxItems", "uniqueItems"),
    }
)


@dataclass(frozen=True, eq=False, slots=True)
class ToolSet:
    """Tools with marks for strings. Compared by identity: made once, then shared."""

    marked: tuple[Mapping[str, Any], ...] = ()
    words: tuple[str, ...] = ()
    """The strings behind the marks `t0`, `t1`, ..."""

    @staticmethod
    def of(tools: Sequence[Mapping[str, Any]]) -> ToolSet:
        """Marks definitions in the form `{"type": "function", "function": {...}}`, or the function alone."""
        marker = _Marker()
        marked = tuple(marker.tool(tool) for tool in tools)
        return ToolSet(marked, tuple(marker.words))


NO_TOOLS = ToolSet()


class _Marker:
    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def word(self, text: str) -> str:
        # One mark for equal strings, so that an entry of `required` still names a property.
        return mark(f"t{self.words.setdefault(text, len(self.words))}") if text else text

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function: Mapping[str, Any] = tool.get("function", tool)
        marked = {
            key: self.schema(value) if key == "parameters" else self.value(value) for key, value in function.items()
        }
        return {"type": "function", "function": marked} if "function" in tool else marked

    def schema(self, schema: Any) -> Any:
        """Marks a schema or a list of schemas."""
        if isinstance(schema, list):
            return [self.schema(element) for element in cast("list[object]", schema)]
        if not isinstance(schema, dict):
            return self.value(schema)
        entries = cast(dict[str, Any], schema)
        return {key if key in KEYWORDS else self.word(key): self.entry(key, value) for key, value in entries.items()}

    def entry(self, key: str, value: Any) -> Any:
        """Marks the value of a key of a schema."""
        if key == "type":
            return self.types(value)
        if key in VALUES:
            return self.value(value)
        if key in NAMED and isinstance(value, dict):
            schemas = cast(dict[str, Any], value)
            return {self.word(name): self.schema(subschema) for name, subschema in schemas.items()}
        return self.schema(value)

    def types(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.types(element) for element in cast("list[object]", value)]
        return value if value in JSON_TYPES else self.value(value)

    def value(self, value: Any) -> Any:
        """Marks all strings of a JSON value."""
        if isinstance(value, str):
            return self.word(value)
        if isinstance(value, dict):
            entries = cast(dict[str, Any], value)
            return {self.word(key): self.value(element) for key, element in entries.items()}
        if isinstance(value, list):
            return [self.value(element) for element in cast("list[object]", value)]
        return value
