"""Converts values of a data file to JSON values, the form of rows on the wire and in storage."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, time
from decimal import Decimal

from kestrl.episode import Json
from kestrl.tools.shapes import is_list, is_mapping

DEEPEST = 100
"""Maximum levels of nesting in a row."""

MAX_VALUES = 1_000_000
"""Maximum values of a JSON text that somebody else wrote: megabytes of small ones take gigabytes of memory."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def exceeds_values(text: bytes) -> bool:
    """Whether JSON has more than `MAX_VALUES` values, without parsing it."""
    return _separators(text) > MAX_VALUES and _separators(_STRING.sub(b"", text)) > MAX_VALUES


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


class Unusable(ValueError):
    """A value that JSON and UTF-8 cannot carry, with the dotted path of its field."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def as_json(value: object, field: str, depth: int = 0) -> Json:
    """A value as JSON.

    Dates and times become ISO 8601 text and decimals their digits as text, so that nothing is rounded.

    Args:
        value: As read from the file.
        field: Its dotted path, for the message.
        depth: Levels above it.

    Raises:
        Unusable: The value, or a value in it, has no exact JSON form.
    """
    if depth > DEEPEST:
        raise Unusable(field, f"is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        return _text(value, field)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _finite(value, field)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if is_mapping(value):
        return {
            _text(str(key), f"{field}.{key!a}"): as_json(item, f"{field}.{key}", depth + 1)
            for key, item in value.items()
        }
    if is_list(value):
        return [as_json(item, f"{field}.{index}", depth + 1) for index, item in enumerate(value)]
    raise Unusable(field, f"is of type {type(value).__name__}, which JSON cannot hold; write it as text or numbers")


def _text(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unusable(
            field, f"holds the lone surrogate U+{ord(value[error.start]):04X}, which is not text; remove it"
        ) from error
    return value


def _finite(value: float, field: str) -> float:
    if not math.isfinite(value):
        raise Unusable(field, f"is {value}, which JSON cannot hold; write null, or leave it out")
    return value


def columns_as_json(columns: dict[str, object]) -> tuple[dict[str, Json], list[str]]:
    """Columns of a row as JSON values, and one problem for each column without a JSON form."""
    usable: dict[str, Json] = {}
    problems: list[str] = []
    for name, value in columns.items():
        try:
            usable[_text(name, ascii(name))] = as_json(value, name)
        except Unusable as error:
            problems.append(str(error))
    return usable, problems


def without_nulls(value: object) -> object:
    """Removes null members: Parquet has every member of a struct in every row, null where it is absent."""
    if is_mapping(value):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if is_list(value):
        return [without_nulls(item) for item in value]
    return value
