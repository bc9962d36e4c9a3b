"""Checks arguments of the model against the schema of the tool.

Strict: a string is never accepted as a list of strings, nor "5" as 5. Messages let the model correct the call: they
name the argument, its value, and what it must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema_rs import ValidationError, ValidationErrorKind

from kestrl.tools import json_schema
from kestrl.tools.json_schema import JsonSchema, TooCostly
from kestrl.tools.references import ReferenceInvalid, pointed
from kestrl.tools.shapes import DEEPEST, is_list, is_mapping, json_problem

MAX_COMPLAINTS = 3
"""Maximum number of reported problems; a small model corrects three better than thirty."""
LARGEST_NUMBER = sys.float_info.max
MAX_SHOWN = 80
"""Maximum characters of an invalid value in a message."""

_KINDS: dict[str, str] = {
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}

_NAMES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("string", (str,)),
    ("number", (int, float)),
    ("array", (list, tuple)),
    ("object", (object,)),
)


class ArgumentsInvalid(ValueError):
    """The arguments do not fit the schema; the message is for the model."""


Convert = Callable[[Any], Any]
"""Converts a JSON value to the declared type of a parameter; raises ValueError."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Checks and converts the arguments of one tool."""

    schema: Mapping[str, Any]
    """JSON Schema of type object."""
    converters: Mapping[str, Convert] = field(default_factory=dict[str, Convert])
    """Converters by argument; other arguments are passed unchanged."""
    dialect: object = None
    """Dialect of the schema (`$schema`), if it is not said there; None means 2020-12."""
    check: JsonSchema = field(init=False, repr=False, compare=False)
    """The compiled schema."""

    def __post_init__(self) -> None:
        """Compiles the schema.

        Raises:
            SchemaInvalid: It cannot be used.
        """
        object.__setattr__(self, "check", JsonSchema(self.schema, self.dialect))

    def parse(self, arguments: object, *, filled: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Keyword arguments of the tool.

        Args:
            arguments: What the model sent.
            filled: Parameters set by the scenario; the model's values for them are dropped.

        Raises:
            ArgumentsInvalid: They do not match the schema, or cannot be checked within bounds.
        """
        if problem := _out_of_range(arguments):
            raise ArgumentsInvalid(problem)
        if problem := json_problem(arguments):
            raise ArgumentsInvalid(f"the arguments cannot be used: {problem}")
        if not is_mapping(arguments):
            raise ArgumentsInvalid(f"the arguments must be an object, but are {_shown(arguments)}")
        model_arguments = {str(name): value for name, value in arguments.items() if name not in filled}
        if problems := self._complaints(model_arguments, filled):
            raise ArgumentsInvalid("; ".join(problems))
        return {name: self._convert(name, value) for name, value in model_arguments.items()}

    def _complaints(self, model_arguments: dict[str, Any], filled: frozenset[str]) -> list[str]:
        """Messages about invalid arguments; empty if they are valid."""
        try:
            problems = self.check.problems(model_arguments)
        except TooCostly:
            return ["the arguments are too large, or nested too deeply, for the schema of the tool"]
        if problems is None:
            return ["the arguments do not match the schema of the tool, and are too large to say where"]
        messages: dict[str, None] = {}
        for error in sorted(problems, key=lambda error: _path(error.instance_path)):
            if not _is_filled(error, filled):
                messages.update(dict.fromkeys(_complaint(error, self.schema)))
        return list(messages)[:MAX_COMPLAINTS]

    def _convert(self, name: str, value: Any) -> Any:
        converter = self.converters.get(name)
        if converter is None:
            return value
        try:
            return converter(value)
        except ValueError as error:
            raise ArgumentsInvalid(f"argument {name!r} {_reason(error)}, but is {_shown(value)}") from error


def _out_of_range(value: object) -> str:
    """Names a number beyond the range of float at any depth, on which checks and tools would overflow."""
    level: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    for _ in range(DEEPEST + 1):
        next_level: list[tuple[tuple[str | int, ...], object]] = []
        for path, item in level:
            if is_mapping(item):
                next_level += [((*path, str(name)), child) for name, child in item.items()]
            elif is_list(item):
                next_level += [((*path, index), child) for index, child in enumerate(item)]
            elif isinstance(item, int | float) and not -LARGEST_NUMBER <= item <= LARGEST_NUMBER:
                return f"argument {_path(path)!r} is a number out of range: its magnitude must be below 1.8e308"
        level = next_level
    return ""


def _is_filled(error: ValidationError, filled: frozenset[str]) -> bool:
    """Whether it says that an argument is missing which the scenario sets."""
    kind = error.kind
    return isinstance(kind, ValidationErrorKind.Required) and not error.instance_path and kind.property in filled


def _complaint(error: ValidationError, schema: Mapping[str, Any]) -> list[str]:
    place = _place(error)
    value: Any = error.instance
    match error.kind:
        case ValidationErrorKind.Required(property=name):
            return [f"{_member(error, name)} is missing"]
        case ValidationErrorKind.AdditionalProperties(unexpected=names):
            allowed = ", ".join(_properties(error, schema)) or "none"
            return [f"{_member(error, name)} is unknown (known: {allowed})" for name in names]
        case ValidationErrorKind.Type() | ValidationErrorKind.Custom(keyword=json_schema.INTEGER):
            return [f"{place} must be {_kind(_types(error))}, but is {_shown(value)}"]
        case ValidationErrorKind.Enum(options=options):
            return [f"{place} must be one of {', '.join(_json(item) for item in options)}, but is {_shown(value)}"]
        case ValidationErrorKind.Constant(expected_value=constant):
            return [f"{place} must be {_json(constant)}, but is {_shown(value)}"]
        case ValidationErrorKind.AnyOf(context=context) | ValidationErrorKind.OneOfNotValid(context=context):
            return _alternatives(error, context, schema)
        case _:
            return [f"{place}: {error.message[: 3 * MAX_SHOWN]}"]


def _alternatives(error: ValidationError, context: list[list[ValidationError]], schema: Mapping[str, Any]) -> list[str]:
    """Message for a union: the allowed types if none matches, else the problem with the closest alternative."""
    place = _place(error)
    kinds = [_wrong_types(problems, error) for problems in context]
    if all(kinds):
        names = dict.fromkeys(_kind(problem) for problem in kinds)
        return [f"{place} must be {' or '.join(names)}, but is {_shown(error.instance)}"]
    nearest = [problems for problems, kind in zip(context, kinds, strict=True) if problems and not kind]
    if not nearest:
        return [f"{place}: {error.message[: 3 * MAX_SHOWN]}"]
    # The closest fails deepest within the value.
    best = max(nearest, key=lambda problems: max(len(problem.instance_path) for problem in problems))
    return _complaint(max(best, key=lambda problem: len(problem.instance_path)), schema)


def _wrong_types(problems: list[ValidationError], error: ValidationError) -> list[str]:
    """The types that an alternative allows, if the value has none of them."""
    same_place = [problem for problem in problems if len(problem.instance_path) == len(error.instance_path)]
    return next((kinds for problem in same_place if (kinds := _types(problem))), list[str]())


def _types(error: ValidationError) -> list[str]:
    match error.kind:
        case ValidationErrorKind.Type(types=kinds):
            return kinds
        case ValidationErrorKind.Custom(keyword=json_schema.INTEGER, message=kinds):
            return kinds.split()
        case _:
            return []


def _properties(error: ValidationError, schema: Mapping[str, Any]) -> list[str]:
    """Names of the properties beside the keyword of an error."""
    part: Any = schema
    try:
        for step in error.evaluation_path[:-1]:
            part = pointed(part["$ref"], schema) if step == "$ref" else part[step]
        return list(part.get("properties", {}))
    except (LookupError, ReferenceInvalid):
        return []


def _kind(names: Sequence[str]) -> str:
    return " or ".join(_KINDS.get(name, name) for name in names)


def _place(error: ValidationError) -> str:
    path = _path(error.instance_path)
    return f"argument {path!r}" if path else "the arguments"


def _member(error: ValidationError, name: str) -> str:
    return f"argument {_path([*error.instance_path, name])!r}"


def _path(parts: Sequence[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shown(value: object) -> str:
    """The value in a message: its type and its beginning."""
    text = _json(value)
    text = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    if value is None or isinstance(value, bool):
        return text
    kind = next(name for name, types in _NAMES if isinstance(value, types))
    return f"the {kind} {text}"


def _reason(error: ValueError) -> str:
    from pydantic import ValidationError as Refused

    if not isinstance(error, Refused):
        return f"is not accepted ({error})"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"is not accepted ({f'{where}: ' if where else ''}{first['msg']})"
