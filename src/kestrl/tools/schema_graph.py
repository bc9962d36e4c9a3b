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
class Load:
    """What a part's patterns cost."""

    of_character: float = 0
    """Work for each character of a text."""
    of_name: float = 0
    """Work for each character of a member's name."""


@dataclass(slots=True, eq=False)
class Part:
    """One schema within a schema."""

    same: list[Part] = field(default_factory=list["Part"])
    """Parts that apply to the same value."""
    properties: dict[str, Part] = field(default_factory=dict[str, "Part"])
    members: list[Part] = field(default_factory=list["Part"])
    """Parts that may apply to any member of an object."""
    prefix: list[Part] = field(default_factory=list["Part"])
    items: list[Part] = field(default_factory=list["Part"])
    """Parts that may apply to any item of a list."""
    weight: int = 1
    """Work of the part itself."""
    load: Load = field(default_factory=Load)
    depth: int = 1
    """Parts within each other that apply to the same value."""
    reach: Counter[Part] | None = None
    """How often each part applies to a value to which this one applies."""


class Graph:
    """The parts of one schema."""

    def __init__(self, root: Mapping[str, Any], visit: Callable[[dict[str, Any]], Load]) -> None:
        """Reads them.

        Args:
            root: The schema, as plain JSON.
            visit: Called with the keywords of each part, which it may change; returns what the patterns in it cost.

        Raises:
            SchemaInvalid: References lead out of it, nowhere or to themselves, or it is too large.
        """
        self._document, self._visit = root, visit
        self._parts: dict[int, Part] = {}
        self._waiting: list[tuple[Any, Part]] = []
        if problem := json_problem(root, MAX_NESTING):
            raise SchemaInvalid(f"it is not JSON: {problem}")
        self.root = self._part(root)
        while self._waiting:
            self._read(*self._waiting.pop())
        for part in self._parts.values():
            _ordered(part)

    def _part(self, schema: Any) -> Part:
        """The part of a schema, which is read later, so that depth is no recursion."""
        known = self._parts.get(id(schema))
        if known is not None:
            return known
        if isinstance(schema, bool):
            return Part()
        if not is_mapping(schema):
            raise SchemaInvalid(f"a part of it is neither an object nor true or false: {str(schema)[:80]}")
        if len(self._parts) >= MAX_PARTS:
            raise SchemaInvalid(f"it has more than {MAX_PARTS} parts")
        part = self._parts[id(schema)] = Part()
        self._waiting.append((schema, part))
        return part

    def _read(self, schema: dict[str, Any], part: Part) -> None:
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
            self._part(inner) for key in SAME_MAPS for inner in _map(schema, key).values() if not is_list(inner)
        ]
        part.properties = {name: self._part(inner) for name, inner in _map(schema, "properties").items()}
        part.members = [self._part(schema[key]) for key in MEMBERS if key in schema]
        part.members += [self._part(inner) for inner in _map(schema, "patternProperties").values()]
        tuple_key = "items" if is_list(schema.get("items")) else "prefixItems"
        part.prefix = [self._part(item) for item in _list(schema, tuple_key)]
        part.items = [self._part(schema[key]) for key in ITEMS if key in schema and not is_list(schema[key])]
        for key in DEFINITIONS:
            for inner in _map(schema, key).values():
                self._part(inner)

    def cost(self, value: object, limit: int) -> int:
        """Work of checking a value: how many parts apply to how many values, each weighed by the values within it.

        Raises:
            TooCostly: It is above the limit.
        """
        total = 0
        level: list[tuple[list[object], Counter[Part]]] = [([value], Counter({self.root: 1}))]
        while level:
            inner: list[tuple[list[object], Counter[Part]]] = []
            for values, applied in level:
                reached: Counter[Part] = Counter()
                for part, times in applied.items():
                    for each, more in _reach(part).items():
                        reached[each] += times * more
                total += sum(int(times * _work(part, values)) for part, times in reached.items())
                if total > limit:
                    raise TooCostly(f"above {limit}")
                inner += _within(values, reached)
            level = inner
        return total


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """As `is_mapping`, for the values of JSON only, since it is asked of every one of them."""
    return isinstance(value, dict)


def _work(part: Part, values: list[object]) -> float:
    """Work of one part on values."""
    work: float = part.weight * len(values)
    if part.load.of_character:
        work += part.load.of_character * sum(len(value) for value in values if isinstance(value, str))
    if part.load.of_name:
        names = (name for value in values if _is_object(value) for name in value)
        work += part.load.of_name * sum(len(name) for name in names)
    return work


def _within(values: list[object], reached: Counter[Part]) -> Iterator[tuple[list[object], Counter[Part]]]:
    """What is in objects and lists, by the parts that may apply to it; parts may apply to what they do not."""
    named = {name for part in reached for name in part.properties}
    longest = max((len(part.prefix) for part in reached), default=0)
    members: dict[str | int, list[object]] = {}
    for value in values:
        if _is_object(value):
            for name, item in value.items():
                members.setdefault(name if name in named else "", []).append(item)
        elif is_list(value):
            for index, item in enumerate(value):
                members.setdefault(min(index, longest), []).append(item)
    for place, items in members.items():
        applied: Counter[Part] = Counter()
        for part, times in reached.items():
            for inner in _applied(part, place):
                applied[inner] += times
        yield items, applied


def _applied(part: Part, place: str | int) -> list[Part]:
    if isinstance(place, int):
        return [*part.prefix[place : place + 1], *part.items]
    return [*([part.properties[place]] if place in part.properties else []), *part.members]


def _ordered(start: Part) -> None:
    """Counts what a part reaches, without recursion; raises SchemaInvalid if that does not end, or is too much."""
    path: list[tuple[Part, Iterator[Part]]] = [(start, iter(start.same))]
    entered = {start}
    while path and start.reach is None:
        part, rest = path[-1]
        following = next((each for each in rest if each.reach is None), None)
        if following is not None:
            if following in entered:
                raise SchemaInvalid("a reference in it leads to itself")
            entered.add(following)
            path.append((following, iter(following.same)))
            continue
        path.pop()
        entered.discard(part)
        part.depth = 1 + max((each.depth for each in part.same), default=0)
        if part.depth > MAX_DEPTH:
            raise SchemaInvalid(f"more than {MAX_DEPTH} parts of it are within each other for the same value")
        part.reach = Counter({part: 1})
        for each in part.same:
            part.reach.update(_reach(each))
            if part.reach.total() > MAX_PARTS:
                raise SchemaInvalid(f"more than {MAX_PARTS} parts of it apply to the same value")


def _reach(part: Part) -> Counter[Part]:
    """How often each part applies with this one; true and false, which are never read, reach themselves."""
    return Counter({part: 1}) if part.reach is None else part.reach


def _values(value: object) -> int:
    """Number of values in the objects and lists of an enumeration or a constant, which are compared one by one."""
    count, level = 0, list(value) if is_list(value) else [value]
    while level:
        item = level.pop()
        inner = list(item.values()) if is_mapping(item) else item if is_list(item) else []
        count += len(inner)
        level += inner
    return count


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if is_list(value) else []


def _map(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if is_mapping(value) else {}
