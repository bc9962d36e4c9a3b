"""Calls as JSON objects with a name and arguments, which most formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from kestrl.formats import Schemas, WrittenCall

ARGUMENTS = ("arguments",)
USUAL = ("arguments", "parameters", "args", "input")
"""Keys under which models write arguments, whatever their format's is."""
IDENTITY = ("name", "id", "type")
"""Members of a call beside its arguments."""
MAX_FAILURES = 64
"""Maximum objects of a text that cannot be read and are looked at."""
_OPENING = re.compile(r'\{\s*"')


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(text: str) -> Any:
    """Parses a JSON value that can be sent over the wire.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a lone surrogate.
    """
    try:
        value = _decoder.decode(text)
        _check_surrogates(value, text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def raw_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, and where it ends.

    Raises:
        ValueError: As `read_json`.
    """
    try:
        value, end = _decoder.raw_decode(text, start)
        _check_surrogates(value, text[start:end])
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value, end


def _check_surrogates(value: Any, text: str) -> None:
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()


def read_object(raw: str, keys: Sequence[str] = ARGUMENTS) -> WrittenCall:
    """The call of one JSON object in a text.

    Args:
        raw: The text.
        keys: Accepted keys of the arguments; messages name the first.
    """
    try:
        value = read_json(raw)
    except ValueError as error:
        return WrittenCall(raw=raw, problem=str(error))
    return call_of(value, raw, keys)


def call_of(value: Any, raw: str, keys: Sequence[str] = ARGUMENTS) -> WrittenCall:
    """The call of a JSON value."""
    if not isinstance(value, dict):
        return WrittenCall(raw=raw, problem="it is not a JSON object")
    call = _unwrapped(cast(dict[str, Any], value))
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return WrittenCall(raw=raw, problem='it has no "name"')
    unknown = [key for key in call if key not in (*keys, *IDENTITY)]
    if unknown:
        problem = f'it has the member "{unknown[0]}"; the arguments are the JSON object "{keys[0]}", and nothing else'
        return WrittenCall(raw=raw, name=name, problem=problem)
    arguments: Any = next((call[key] for key in keys if key in call), dict[str, Any]())
    return with_arguments(name, arguments, raw, f'"{keys[0]}" is not a JSON object')


def _unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    """A call in the form of OpenAI's API, `{"type": "function", "function": {...}}`, as its function alone."""
    function = value.get("function")
    return (
        cast(dict[str, Any], function)
        if isinstance(function, dict) and value.keys() <= {"function", *IDENTITY}
        else value
    )


def objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """The JSON objects in a text that are in no other: where each begins and ends, and its value, or the ValueError of
    one that cannot be read.
    """
    end = failures = 0
    for opening in _OPENING.finditer(text):
        start = opening.start()
        if start < end:
            continue
        try:
            value, end = raw_json(text, start)
        except ValueError as error:
            failures += 1
            if failures > MAX_FAILURES:
                return
            yield start, len(text), error
        else:
            yield start, end, value


def stray_calls(text: str, schemas: Schemas, keys: Sequence[str], problem: str) -> tuple[str, list[WrittenCall]]:
    """A text without objects that name an offered tool and arguments, and these objects as calls that cannot be read:
    the model wrote them outside the markers of its format.

    Args:
        text: Of a turn, outside markers.
        schemas: Of the offered tools.
        keys: Accepted keys of the arguments.
        problem: The message to the model.
    """
    calls: list[WrittenCall] = []
    content: list[str] = []
    position = 0
    for start, end, value in objects(text):
        if not names_tool(value, schemas, keys):
            continue
        content.append(text[position:start])
        calls.append(WrittenCall(raw=text[start:end], problem=problem))
        position = end
    content.append(text[position:])
    return "".join(content).strip() if calls else text, calls


def names_tool(value: Any, schemas: Schemas, keys: Sequence[str]) -> bool:
    """Whether an object is a call of an offered tool, with arguments under one of the usual keys."""
    if not isinstance(value, dict):
        return False
    call = _unwrapped(cast(dict[str, Any], value))
    return call.get("name") in schemas and any(key in call for key in (*keys, *USUAL))


def with_arguments(
    name: str, arguments: Any, raw: str, problem: str = "the arguments are not a JSON object"
) -> WrittenCall:
    """The call of a name and a JSON value."""
    if not isinstance(arguments, dict):
        return WrittenCall(raw=raw, name=name, problem=problem)
    return WrittenCall(raw=raw, name=name, arguments=cast(dict[str, Any], arguments))


def write_object(name: str, arguments: Mapping[str, Any], key: str = ARGUMENTS[0]) -> str:
    """A call as a JSON object."""
    return write_json({"name": name, key: dict(arguments)})


def write_json(value: Any) -> str:
    """JSON in the style of chat templates."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
