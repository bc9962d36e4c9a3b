"""Checks arguments of the model against the schema of the tool.

Strict: a string is never accepted as a list of strings, nor "5" as 5. Messages let the model correct the call: they
name the argument, its value, and what it must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kestrl.tools.shapes import is_list, is_mapping

# The stubs leave most types of the library unknown.
jsonschema: Any = import_module("jsonschema")
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


def _is_integer(_checker: object, value: object) -> bool:
    # 1.0 is an integer in JSON Schema, but not for a Python parameter of type int.
    return isinstance(value, int) and not isinstance(value, bool)


_Validator: Any = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
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

    def parse(self, arguments: object, *, filled: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Keyword arguments of the tool.

        Args:
            arguments: What the model sent.
            filled: Parameters set by the scenario; the model's values for them are dropped.

        Raises:
            ArgumentsInvalid: They do not match the schema.
        """
        if not is_mapping(arguments):
            raise ArgumentsInvalid(f"the arguments must be an object, but are {_shown(arguments)}")
        given = {str(name): value for name, value in arguments.items() if name not in filled}
        problems = _out_of_range(given) or complaints(self._without(filled), given)
        if problems:
            raise ArgumentsInvalid("; ".join(problems))
        return {name: self._convert(name, value) for name, value in given.items()}

    def _without(self, filled: frozenset[str]) -> Mapping[str, Any]:
        required: list[str] = self.schema.get("required", [])
        if filled.isdisjoint(required):
            return self.schema
        return {**self.schema, "required": [name for name in required if name not in filled]}

    def _convert(self, name: str, value: Any) -> Any:
        converter = self.converters.get(name)
        if converter is None:
            return value
        try:
            return converter(value)
        except ValueError as error:
            raise ArgumentsInvalid(f"argument {name!r} {_reason(error)}, but is {_shown(value)}") from error


def _out_of_range(value: object, path: str = "") -> list[str]:
    """Refuses numbers beyond the range of float at any depth, on which checks and tools would overflow."""
    if is_mapping(value):
        parts = [(f"{path}.{name}" if path else str(name), inner) for name, inner in value.items()]
    elif is_list(value):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    elif isinstance(value, int | float) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        return [f"argument {path!r} is a number out of range: its magnitude must be below 1.8e308"]
    else:
        return []
    return [problem for place, inner in parts for problem in _out_of_range(inner, place)][:MAX_COMPLAINTS]


def complaints(schema: Mapping[str, Any], instance: object) -> list[str]:
    """Messages about an invalid value; empty if it is valid."""
    errors: list[Any] = list(_Validator(schema).iter_errors(instance))
    messages: dict[str, None] = {}
    for error in sorted(errors, key=_path):
        messages.update(dict.fromkeys(_complaint(error)))
    return list(messages)[:MAX_COMPLAINTS]


def _complaint(error: Any) -> list[str]:
    place = _place(error)
    value: Any = error.instance
    wanted: Any = error.validator_value
    match error.validator:
        case "required":
            return [f"{_member(error, name)} is missing" for name in wanted if name not in value]
        case "additionalProperties" if wanted is False:
            known: Mapping[str, Any] = error.schema.get("properties", {})
            allowed = ", ".join(known) or "none"
            return [f"{_member(error, name)} is unknown (known: {allowed})" for name in value if name not in known]
        case "type":
            return [f"{place} must be {_kind(wanted)}, but is {_shown(value)}"]
        case "enum":
            return [f"{place} must be one of {', '.join(_json(item) for item in wanted)}, but is {_shown(value)}"]
        case "const":
            return [f"{place} must be {_json(wanted)}, but is {_shown(value)}"]
        case "anyOf" | "oneOf":
            return _alternatives(error, place)
        case _:
            return [f"{place}: {error.message[: 3 * MAX_SHOWN]}"]


def _alternatives(error: Any, place: str) -> list[str]:
    """Message for a union: the allowed types if none matches, else the problem with the closest alternative."""
    inner: list[Any] = list(error.context or ())
    wrong_types = [each for each in inner if each.validator == "type" and not each.relative_path]
    schemas: list[Any] = list(error.validator_value)
    if len(wrong_types) == len(schemas):
        kinds = dict.fromkeys(_kind(each.validator_value) for each in wrong_types)
        return [f"{place} must be {' or '.join(kinds)}, but is {_shown(error.instance)}"]
    nearest = jsonschema.exceptions.best_match([each for each in inner if each not in wrong_types])
    return [f"{place}: {error.message[: 3 * MAX_SHOWN]}"] if nearest is None else _complaint(nearest)


def _kind(wanted: str | list[str]) -> str:
    names = [wanted] if isinstance(wanted, str) else wanted
    return " or ".join(_KINDS.get(name, name) for name in names)


def _place(error: Any) -> str:
    path = _path(error)
    return f"argument {path!r}" if path else "the arguments"


def _member(error: Any, name: str) -> str:
    path = _path(error)
    return f"argument {(f'{path}.{name}' if path else name)!r}"


def _path(error: Any) -> str:
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
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
