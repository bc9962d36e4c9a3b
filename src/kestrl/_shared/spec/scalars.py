"""Scalars of the manifest: Go-style durations, addresses, import paths."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, NamedTuple, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
LONGEST_SECONDS = 3652 * 86400.0
LONGEST_SHOWN = 100
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: Any) -> float:
    """Seconds of a Go-style duration such as `30s`, `2m`, `1h30m`, `1d`.

    Raises:
        ValueError: The text is not a duration, or the duration is above ten years, or below a millisecond and not `0s`.
    """
    if not isinstance(value, str) or not DURATION.fullmatch(value):
        excerpt = repr(value)
        excerpt = excerpt if len(excerpt) <= LONGEST_SHOWN else f"{excerpt[:LONGEST_SHOWN]}..."
        raise ValueError(f"{excerpt} is not a duration; write one such as 30s, 2m or 1h30m")
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


RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"""Variables of a chat template that the worker sets."""


def _check_template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in RESERVED_ARGUMENTS or name.endswith("_token"):
            raise ValueError(f"{name!r} is set by KestRL; remove it")
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a variable; use letters, digits and _")
    return value


def _check_json(value: Any, path: str) -> None:
    """Checks that a value has a JSON form, in which components receive it.

    Raises:
        ValueError: The value has none; the message has the path inside the value.
    """
    if isinstance(value, dict):
        for key, member in cast(Any, value).items():
            if not isinstance(key, str):
                raise ValueError(f"{path}: the key {key!r} is not a string; quote it")
            _check_json(key, path)
            _check_json(member, f"{path}.{key}")
    elif isinstance(value, list):
        for index, member in enumerate(cast(Any, value)):
            _check_json(member, f"{path}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not a JSON number; write a finite one, or a string")
    elif isinstance(value, str):
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise ValueError(f"{path}: holds a lone surrogate, which is not a character; remove it")
    elif not isinstance(value, bool | int | None):
        raise ValueError(f"{path}: {value!r} is a {type(value).__name__}, which JSON does not have; quote it")


def json_object(value: dict[str, Any]) -> dict[str, Any]:
    """Checks that a map has a JSON form; raises ValueError with the path of the problem."""
    for name, member in value.items():
        _check_json(member, name)
    return value


def format_duration(seconds: float) -> str:
    """Formats a duration as in a manifest."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    remaining = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, remaining = divmod(remaining, size)
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
"""A map of JSON values, passed to components unchanged."""

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`package.module:Name`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label, as required for Kubernetes names."""

JobName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label that begins with a letter, as required for the Services named after the job."""

Address = Annotated[str, Field(min_length=1)]
"""A path, or scheme://..."""

ImageName = Annotated[str, Field(pattern=r"^[^\s]+$", max_length=512)]
"""A container image, such as registry.example.com/team/agent:1."""

RuntimeClassName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]

BaseUrl = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")]
"""`http://` or `https://`, a host, and a path such as /v1; without credentials."""
TemplateArguments = Annotated[JsonObject, AfterValidator(_check_template_arguments)]
"""Variables that a chat template is rendered with."""

OBJECT_SCHEMES = frozenset({"s3", "gs", "az"})
"""Schemes of object stores, which pods and machines reach alike."""
PINNED = re.compile(r"(?P<address>(?:s3|gs|az)://[^/#]+/[^#]*[^/#])#sha256=(?P<digest>[0-9a-f]{64})")


class PinnedFile(NamedTuple):
    """A file of an object store and its content's digest."""

    address: str
    digest: str

    @classmethod
    def read(cls, uri: str) -> Self | None:
        """The file that a URI names; None if the URI is not one of an object store with a digest."""
        match = PINNED.fullmatch(uri)
        return None if match is None else cls(match["address"], match["digest"])

    def place(self, folder: str) -> str:
        """Where the file is kept in a folder of such files."""
        return f"{folder}/{self.digest}/{self.address.rpartition('/')[2]}"
