"""The parts of a JSON Schema and how they apply to a value: what bounds the work of a check before it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from kestrl.tools.references import ReferenceInvalid, pointed
from kestrl.tools.shapes import is_list, is_mapping, json_problem

MAX_PARTS = 5000
"""Maximum parts of a schema, and maximum parts that apply to the same value, with references followed."""
MAX_DEPTH = 64
"""Maximum parts within each other that apply to the same value."""
MAX_NESTING = 200
"""Maximum levels of the schema as JSON."""
REFUSED = frozenset({"$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$id", "$schema"})
"""Keywords that change what references mean."""
OF_ROOT = frozenset({"$anchor", "$id", "$schema"})
"""Those that a whole schema may have: all references in it begin at its root anyway."""
SAME_ONE = ("not", "if", "then", "else")
SAME_LISTS = ("allOf", "anyOf", "oneOf")
SAME_MAPS = ("dependentSchemas", "dependencies")
MEMBERS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains")
DEFINITIONS = ("$defs", "definitions")


class SchemaInvalid(ValueError):
    """The schema cannot be used; the message says why."""


class TooCostly(ValueError):
    """The check of a value would take more than its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCost:
    """What a part's patterns cost."""

    of_character: float = 0
    """Work for each character of a text."""
    of_name: float = 0
    """Work for each character of a member's name."""


@dataclass(slots=True, eq=False)
class SchemaPart:
    """One schema within a schema."""

    same: list[SchemaPart] = field(default_factory=list["SchemaPart"])
    """Parts that apply to the same value."""
    properties: dict[str, SchemaPart] = field(default_factory=dict[str, "SchemaPart"])
    members: list[SchemaPart] = field(default_factory=list["SchemaPart"])
    """Parts that may apply to any member of an object."""
    prefix: list[SchemaPart] = field(default_factory=list["SchemaPart"])
    items: list[SchemaPart] = field(default_factory=list["SchemaPart"])
    """Parts that may apply to any item of a list."""
    weight: int = 1
    """Work of the part itself."""
    load: PatternCost = field(default_factory=PatternCost)
    depth: int = 1
    """Parts within each other that apply to the same value."""
    reach: Counter[SchemaPart] | None = None
    """How often each part applies to a value to which this one applies."""


class Graph:
    """The parts of one schema."""

    def __init__(self, root: Mapping[str, Any], visit: Callable[[dict[str, Any]], PatternCost]) -> None:
        """Reads them.

        Args:
            root: The schema, as plain JSON.
            visit: Called with the keywords of each part, which it may change; returns what the patterns in it cost.

        Raises:
            SchemaInvalid: References lead out of it, nowhere or to themselves, or it is too large.
        """
        self._document, self._visit = root, visit
        self._parts: dict[int, SchemaPart] = {}
        self._waiting: list[tuple[Any, SchemaPart]] = []
        if problem := json_problem(root, MAX_NESTING):
            raise SchemaInvalid(f"it is not JSON: {problem}")
        self.root = self._part(root)
        while self._waiting:
            self._read(*self._waiting.pop())
        for part in self._parts.values():
            _ordered(part)

    def _part(self, schema: Any) -> SchemaPart:
        """The part of a schema, which is read later, so that depth is no recursion."""
        known_part = self._parts.get(id(schema))
        if known_part is not None:
            return known_part
        if isinstance(schema, bool):
            return SchemaPart()
        if not is_mapping(schema):
            raise SchemaInvalid(f"a part of it is neither an object nor true or false: {str(schema)[:80]}")
        if len(self._parts) >= MAX_PARTS:
            raise SchemaInvalid(f"it has more than {MAX_PARTS} parts")
        part = self._parts[id(schema)] = SchemaPart()
        self._waiting.append((schema, part))
        return part

    def _read(self, schema: dict[str, Any], part: SchemaPart) -> None:
        allowed = OF_ROOT if schema is self._document else frozenset[str]()
        if refused := sorted((REFUSED - allowed) & schema.keys()):
            raise SchemaInvalid(f"it has {refused[0]}, which changes what references mean")
        part.load = self._visit(schema)
        part.weight += _values(schema.get("enum")) + _values(schema.get("const"))
        if "$ref" in schema:
            try:
                part.same.append(self._part(pointed(schema["$ref"], self._document)))
            except ReferenceInvalid as error:
                raise SchemaInvalid(str(error)) from error
        part.same += [self._part(schema[key]) for key in SAME_ONE if key in schema]
        part.same += [self._part(item) for key in SAME_LISTS for item in _list(schema, key)]
        part.same += [
            self._part(subschema)
            for key in SAME_MAPS
            for subschema in _map(schema, key).values()
            if not is_list(subschema)
        ]
        part.properties = {name: self._part(subschema) for name, subschema in _map(schema, "properties").items()}
        part.members = [self._part(schema[key]) for key in MEMBERS if key in schema]
        part.members += [self._part(subschema) for subschema in _map(schema, "patternProperties").values()]
        tuple_key = "items" if is_list(schema.get("items")) else "prefixItems"
        part.prefix = [self._part(item) for item in _list(schema, tuple_key)]
        part.items = [self._part(schema[key]) for key in ITEMS if key in schema and not is_list(schema[key])]
        for key in DEFINITIONS:
            for subschema in _map(schema, key).values():
                self._part(subschema)

    def cost(self, value: object, limit: int) -> int:
        """Work of checking a value: how many parts apply to how many values, each weighed by the values within it.

        Raises:
            TooCostly: It is above the limit.
        """
        total = 0
        level: list[tuple[list[object], Counter[SchemaPart]]] = [([value], Counter({self.root: 1}))]
        while level:
            next_level: list[tuple[list[object], Counter[SchemaPart]]] = []
            for values, applied in level:
                reached: Counter[SchemaPart] = Counter()
                for part, times in applied.items():
                    for reachable, more in _reach(part).items():
                        reached[reachable] += times * more
                total += sum(int(times * _work(part, values)) for part, times in reached.items())
                if total > limit:
                    raise TooCostly(f"above {limit}")
                next_level += _within(values, reached)
            level = next_level
        return total


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """As `is_mapping`, for the values of JSON only, since it is asked of every one of them."""
    return isinstance(value, dict)


def _work(part: SchemaPart, values: list[object]) -> float:
    """Work of one part on values."""
    work: float = part.weight * len(values)
    if part.load.of_character:
        work += part.load.of_character * sum(len(value) for value in values if isinstance(value, str))
    if part.load.of_name:
        names = (name for value in values if _is_object(value) for name in value)
        work += part.load.of_name * sum(len(name) for name in names)
    return work


def _within(values: list[object], reached: Counter[SchemaPart]) -> Iterator[tuple[list[object], Counter[SchemaPart]]]:
    """What is in objects and lists, by the parts that may apply to it; parts may apply to what they do not."""
    property_names = {name for part in reached for name in part.properties}
    longest = max((len(part.prefix) for part in reached), default=0)
    members: dict[str | int, list[object]] = {}
    for value in values:
        if _is_object(value):
            for name, item in value.items():
                members.setdefault(name if name in property_names else "", []).append(item)
        elif is_list(value):
            for index, item in enumerate(value):
                members.setdefault(min(index, longest), []).append(item)
    for place, items in members.items():
        applied: Counter[SchemaPart] = Counter()
        for part, times in reached.items():
            for member in _applied(part, place):
                applied[member] += times
        yield items, applied


def _applied(part: SchemaPart, place: str | int) -> list[SchemaPart]:
    if isinstance(place, int):
        return [*part.prefix[place : place + 1], *part.items]
    return [*([part.properties[place]] if place in part.properties else []), *part.members]


def _ordered(start: SchemaPart) -> None:
    """Counts what a part reaches, without recursion; raises SchemaInvalid if that does not end, or is too much."""
    path: list[tuple[SchemaPart, Iterator[SchemaPart]]] = [(start, iter(start.same))]
    entered = {start}
    while path and start.reach is None:
        part, untried = path[-1]
        following = next((successor for successor in untried if successor.reach is None), None)
        if following is not None:
            if following in entered:
                raise SchemaInvalid("a reference in it leads to itself")
            entered.add(following)
            path.append((following, iter(following.same)))
            continue
        path.pop()
        entered.discard(part)
        part.depth = 1 + max((successor.depth for successor in part.same), default=0)
        if part.depth > MAX_DEPTH:
            raise SchemaInvalid(f"more than {MAX_DEPTH} parts of it are within each other for the same value")
        part.reach = Counter({part: 1})
        for successor in part.same:
            part.reach.update(_reach(successor))
            if part.reach.total() > MAX_PARTS:
                raise SchemaInvalid(f"more than {MAX_PARTS} parts of it apply to the same value")


def _reach(part: SchemaPart) -> Counter[SchemaPart]:
    """How often each part applies with this one; true and false, which are never read, reach themselves."""
    return Counter({part: 1}) if part.reach is None else part.reach


def _values(value: object) -> int:
    """Number of values in the objects and lists of an enumeration or a constant, which are compared one by one."""
    count, level = 0, list(value) if is_list(value) else [value]
    while level:
        item = level.pop()
        children = list(item.values()) if is_mapping(item) else item if is_list(item) else []
        count += len(children)
        level += children
    return count


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if is_list(value) else []


def _map(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if is_mapping(value) else {}
