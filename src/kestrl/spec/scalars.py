"""Scalars of the manifest: Go-style durations, addresses, import paths."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: Any) -> float:
    """Seconds of a Go-style duration such as `30s`, `2m`, `1h30m`, `1d`.

    Raises:
        ValueError: It is not one.
    """
    if isinstance(value, float):  # already parsed: a model built in Python, or validated again
        return value
    if not isinstance(value, str) or not DURATION.fullmatch(value):
        raise ValueError(f"{value!r} is not a duration; write one such as 30s, 2m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))


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


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": f"^{DURATION.pattern}$"}),
]
"""Seconds, written as a Go-style string."""

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`package.module:Name`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label, as Kubernetes wants names."""

Address = Annotated[str, Field(min_length=1)]
"""A path, or scheme://..."""
