"""JSON Schema as a boundary of its own: what a provider lists is read, bounded and compiled once, and what a model
sends is checked against it. Nothing is ever retrieved.

The work of a check is bounded before it is done (`schema_graph`), so that it may be done on an event loop. Patterns
take time linear in the text; those that cannot, with look-around, are checked on short texts only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jsonschema_rs

from kestrl.tools.schema_graph import MAX_NESTING, Graph, PatternCost, SchemaInvalid, TooCostly
from kestrl.tools.shapes import is_list, is_mapping, json_problem

__all__ = ["JsonSchema", "SchemaInvalid", "TooCostly", "pattern_size"]

DIALECTS: dict[str, Any] = {
    "json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
    "json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
}
"""Dialects by `$schema`; 2020-12 without one."""
MAX_COST = 200_000
"""Work of the check of one value: about how many schemas are compared with how many values in it."""
MAX_SHOWN_COST = 2000
"""Work up to which every problem is collected: the library copies the value for each."""
PATTERN_BYTES = tuple(1 << power for power in range(12, 21, 2))
"""Sizes of compiled patterns: the time for each character is below the size in which a pattern fits. None is larger
than the last."""
BYTES_PER_WORK = 5000
"""Size of a pattern that costs one unit of work for each character."""
BACKTRACKS = 10_000
"""Maximum steps of a pattern with look-around."""
MAX_LOOKED_AROUND = 4096
"""Maximum characters of a text that is compared with a pattern with look-around."""
INTEGER, LOOK_AROUND = "kestrl:integer", "kestrl:pattern"
"""Keywords of our own: a whole number written as such, and a pattern that takes bounded steps."""
_STEPS = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=BACKTRACKS, size_limit=PATTERN_BYTES[-1], dfa_size_limit=PATTERN_BYTES[-1]
)


class _Integer:
    """Refuses 1.0, an integer in JSON Schema, but not for a Python parameter of type int; its error has the types."""

    def __init__(self, _schema: object, kinds: list[str], _path: object) -> None:
        self._kinds = kinds

    def validate(self, instance: object) -> None:
        if isinstance(instance, float) and instance.is_integer():
            raise ValueError(" ".join(self._kinds))


class _LookAround:
    def __init__(self, _schema: object, pattern: str, _path: object) -> None:
        self._pattern = pattern
        self._validator = _with_pattern(pattern, _STEPS)

    def validate(self, instance: object) -> None:
        if not isinstance(instance, str):
            return
        if len(instance) > MAX_LOOKED_AROUND:
            raise ValueError(f"is longer than {MAX_LOOKED_AROUND} characters, which its pattern cannot have")
        if not self._validator.is_valid(instance):
            raise ValueError(f"does not match {self._pattern!r}")


class JsonSchema:
    """A compiled schema."""

    def __init__(self, schema: Mapping[str, Any], dialect: object = None) -> None:
        """Reads, bounds and compiles it.

        Args:
            schema: The schema.
            dialect: Its `$schema`, if it has none itself.

        Raises:
            SchemaInvalid: It is no JSON Schema, or cannot be checked within bounds; the message says why.
        """
        if problem := json_problem(schema, MAX_NESTING):
            raise SchemaInvalid(f"it is not JSON: {problem}")
        document: dict[str, Any] = json.loads(json.dumps(schema))
        draft = _draft(document.pop("$schema", dialect))
        document.pop("$id", None)
        if draft is jsonschema_rs.Draft4Validator:
            document.pop("id", None)
        self._alternatives = False
        self._draft = draft
        self._graph = Graph(document, self._prepared)
        self._validator = _compiled(document, draft)

    def _prepared(self, part: dict[str, Any]) -> PatternCost:
        """Adds our keywords to a part, and says what its patterns cost."""
        if self._draft is jsonschema_rs.Draft4Validator and isinstance(part.get("id"), str):
            raise SchemaInvalid("it has id, which changes what references mean")
        self._alternatives |= "anyOf" in part or "oneOf" in part
        kinds = part.get("type")
        kinds = kinds if is_list(kinds) else [kinds]
        if "integer" in kinds and "number" not in kinds:
            part[INTEGER] = kinds
        names = part.get("patternProperties")
        load = PatternCost(of_name=sum(_work(name, short=False) for name in (names if is_mapping(names) else ())))
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            load = replace(load, of_character=_work(pattern, short=True))
            if not pattern_size(pattern):
                part[LOOK_AROUND] = part.pop("pattern")
        return load

    def is_valid(self, value: object) -> bool:
        """Whether a JSON value fits.

        Raises:
            TooCostly: The check would take too much work.
        """
        self._graph.cost(value, MAX_COST)
        return self._validator.is_valid(value)

    def problems(self, value: object) -> list[jsonschema_rs.ValidationError] | None:
        """What is wrong with a value: everything if that is cheap, else the first; None if even that is not.

        Raises:
            TooCostly: The check would take too much work.
        """
        cost = self._graph.cost(value, MAX_COST)
        if self._validator.is_valid(value):
            return []
        if cost <= MAX_SHOWN_COST:
            return list(self._validator.iter_errors(value))
        if self._alternatives:
            return None
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return [error]
        return None


@lru_cache(maxsize=1024)
def pattern_size(pattern: str) -> int:
    """Bound on the size of a pattern that takes time linear in the text; 0 if it needs look-around or back references.

    Raises:
        SchemaInvalid: It is no regular expression, or too large.
    """
    for size in PATTERN_BYTES:
        try:
            _with_pattern(pattern, jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=PATTERN_BYTES[-1]))
        except SchemaInvalid:
            continue
        return size
    _with_pattern(pattern, _STEPS)
    return 0


def _work(pattern: str, *, short: bool) -> float:
    """Work for each character of a text; raises SchemaInvalid for look-around where texts are not `short`."""
    size = pattern_size(pattern)
    if not size and not short:
        raise SchemaInvalid(f"the pattern {pattern[:80]!r} of names in it needs look-around")
    return (size or BACKTRACKS) / BYTES_PER_WORK


def _with_pattern(
    pattern: str, options: jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions
) -> jsonschema_rs.Draft202012Validator:
    try:
        return jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=options, offline=True)
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise SchemaInvalid(f"the pattern {pattern[:80]!r} is not a regular expression, or is too large") from error


def _draft(dialect: object) -> Any:
    if dialect is None:
        return jsonschema_rs.Draft202012Validator
    place = re.sub("^https?://", "", dialect).removesuffix("#") if isinstance(dialect, str) else ""
    if place not in DIALECTS:
        raise SchemaInvalid(f"its dialect {str(dialect)[:80]!r} is not one of draft-04 to 2020-12")
    return DIALECTS[place]


def _compiled(document: dict[str, Any], draft: Any) -> jsonschema_rs.Draft202012Validator:
    try:
        validator: jsonschema_rs.Draft202012Validator = draft(
            document,
            validate_formats=False,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES[-1], dfa_size_limit=PATTERN_BYTES[-1]),
            keywords={INTEGER: _Integer, LOOK_AROUND: _LookAround},
            offline=True,
        )
    except jsonschema_rs.ValidationError as error:
        place = ".".join(map(str, error.instance_path))
        raise SchemaInvalid(f"{f'{place}: ' if place else ''}{error.message[:200]}") from error
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise SchemaInvalid(str(error)[:200]) from error
    return validator
