"""Calls as JSON objects with a name and arguments, which most formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from kestrl.formats import WrittenCall

ARGUMENTS = ("arguments",)


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
    call = cast(dict[str, Any], value)
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return WrittenCall(raw=raw, problem='it has no "name"')
    arguments: Any = next((call[key] for key in keys if key in call), dict[str, Any]())
    return with_arguments(name, arguments, raw, f'"{keys[0]}" is not a JSON object')


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
