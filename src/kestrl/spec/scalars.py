"""Scalars of the manifest: Go-style durations, addresses, import paths."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
LONGEST_SECONDS = 3652 * 86400.0
LONGEST_SHOWN = 100
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: Any) -> float:
    """Seconds of a Go-style duration such as `30s`, `2m`, `1h30m`, `1d`.

    Raises:
        ValueError: It is not one, or it is longer than ten years or shorter than a millisecond without being `0s`.
    """
    if not isinstance(value, str) or not DURATION.fullmatch(value):
        shown = repr(value)
        shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
        raise ValueError(f"{shown} is not a duration; write one such as 30s, 2m or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    if seconds > LONGEST_SECONDS:
        raise ValueError("is longer than ten years; write a duration such as 12h or 30d")
    if 0 < seconds < _SECONDS["ms"]:
        raise ValueError("is shorter than 1ms, the shortest duration there is")
    return seconds


def _longer_than_nothing(seconds: float) -> float:
    if seconds == 0:
        raise ValueError("0s leaves no time; write a duration such as 30s, 2m or 1h30m")
    return seconds


def _check_json(value: Any, path: str) -> None:
    """Checks that a value is JSON, since that is how components receive it.

    Raises:
        ValueError: With the place inside the value.
    """
    if isinstance(value, dict):
        for key, inner in cast(Any, value).items():
            if not isinstance(key, str):
                raise ValueError(f"{path}: the key {key!r} is no string; quote it")
            _check_json(key, path)
            _check_json(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(cast(Any, value)):
            _check_json(inner, f"{path}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is no JSON number; write a finite one, or a string")
    elif isinstance(value, str):
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise ValueError(f"{path}: holds a lone surrogate, which is no character; remove it")
    elif not isinstance(value, bool | int | None):
        raise ValueError(f"{path}: {value!r} is a {type(value).__name__}, which JSON does not have; quote it")


def json_object(value: dict[str, Any]) -> dict[str, Any]:
    """A map that JSON can hold; raises ValueError with the place that it cannot."""
    for name, inner in value.items():
        _check_json(inner, name)
    return value


def format_duration(seconds: float) -> str:
    """The duration as written in a manifest."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    rest = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


DurationOrZero = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": f"^{DURATION.pattern}$"}),
]
"""Seconds, written as a Go-style string; `0s` is one."""

Duration = Annotated[DurationOrZero, AfterValidator(_longer_than_nothing)]
"""Seconds above 0, written as a Go-style string."""

JsonObject = Annotated[dict[str, Any], AfterValidator(json_object)]
"""A map of JSON values, which reaches components as it is written."""

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`package.module:Name`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label, as Kubernetes wants names."""

JobName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label that begins with a letter, as Kubernetes wants the names of Services, which are made of it."""

Address = Annotated[str, Field(min_length=1)]
"""A path, or scheme://..."""
