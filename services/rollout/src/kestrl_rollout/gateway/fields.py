"""Fields of a client's request: what is read, what is the job's, and what is refused by its name. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import msgspec

from kestrl.agents import Limits
from kestrl.errors import encodable

FORCED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        "repetition_penalty",
    }
)
"""Parameters of sampling that are the job's."""
LEARNER = "the learner must compute the distribution that was sampled from"
REMEDIES: Mapping[str, str] = {
    "n": "make one call for each sample",
    "logit_bias": LEARNER,
    "bad_words": LEARNER,
    "structured_outputs": LEARNER,
}
LARGEST_COUNT = 2**31 - 1


class Refused(Exception):
    """A request that the client has to change."""

    def __init__(self, message: str, *, code: str = "unsupported_parameter", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """What a face does with the fields of a request."""

    read: frozenset[str]
    """Fields that the face reads."""
    harmless: frozenset[str] = frozenset()
    """Fields that change nothing that the model could say."""
    recorded: frozenset[str] = frozenset()
    """Fields that are not obeyed, and counted."""
    defaults: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Fields that only these values leave as they are; null is always allowed."""
    remedies: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, fields: Mapping[str, Any], sampling: Mapping[str, Any], *, prefix: str = "") -> list[str]:
        """Names of the metrics that count what was asked for and not obeyed.

        Args:
            fields: The request's.
            sampling: The job's parameters by name.
            prefix: Stands before their names in messages.

        Raises:
            Refused: A field would change what is sampled, or is not known.
        """
        metrics: list[str] = []
        for name, value in fields.items():
            if value is None or name in self.read or name in self.harmless:
                continue
            if name in FORCED:
                if value != sampling.get(name, value):
                    metrics.append(f"sampling_forced.{name}")
            elif name in self.defaults:
                if not any(value == default and type(value) is type(default) for default in self.defaults[name]):
                    raise self.unknown(name, prefix)
            elif name in self.recorded:
                metrics.append(not_obeyed(name))
            else:
                raise self.unknown(name, prefix)
        return metrics

    def unknown(self, name: str, prefix: str = "") -> Refused:
        """The refusal of a field."""
        remedy = {**REMEDIES, **self.remedies}.get(name, "leave it out")
        return Refused(f"{prefix}{name} is not supported in training: {remedy}", field=f"{prefix}{name}")


def not_obeyed(name: str) -> str:
    """The metric of a field that is sampled as if it were not there."""
    return f"asked_not_forced.{name}"


SPELLINGS: Mapping[str, Sequence[str]] = {"response_format": ("response_format", "output_format")}
"""Fields of the faces that ask for the same."""


def check_forced(metrics: Sequence[str], refused: Sequence[str]) -> None:
    """Refuses a request for what cannot be forced, where the job wants that.

    Args:
        metrics: Names of the metrics that count what the request asks for and is not obeyed.
        refused: Fields that the job refuses.

    Raises:
        Refused: It asks for one of them (code `not_forced`).
    """
    for name in refused:
        if any(not_obeyed(spelling) in metrics for spelling in SPELLINGS.get(name, (name,))):
            raise Refused(
                f"{name} would change what the model samples, and the job refuses it (agent.refuses): leave it out",
                code="not_forced",
                field=name,
            )


def job_sampling(limits: Limits) -> dict[str, Any]:
    """The job's parameters of sampling by name."""
    return {
        "temperature": limits.temperature,
        "top_p": limits.top_p,
        "top_k": limits.top_k or -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
    }


def read_object(body: bytes) -> dict[str, Any]:
    """The body of a request.

    Raises:
        Refused: It is no JSON object.
    """
    try:
        request: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        request = _repaired(body)
    if not isinstance(request, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    return cast("dict[str, Any]", request)


def _repaired(body: bytes) -> Any:
    """A body with question marks for lone surrogates, which no tokenizer takes."""
    try:
        request: Any = json.loads(body.decode(), parse_constant=_refuse_constant)
        return json.loads(encodable(json.dumps(request, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def invalid(name: str, expected: str) -> Refused:
    """The refusal of a value."""
    return Refused(f"{name} is not {expected}", code="invalid_value", field=name)


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """A list of objects; null is an empty one."""
    entries = cast("list[Any]", value) if isinstance(value, list) else None if value is not None else []
    if entries is None or not all(isinstance(entry, dict) for entry in entries):
        raise invalid(name, "a list of objects")
    return cast("list[Mapping[str, Any]]", entries)


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """An object; null is an empty one."""
    if value is not None and not isinstance(value, dict):
        raise invalid(name, "an object")
    return cast("Mapping[str, Any]", value or {})


def string(value: Any, name: str) -> str:
    """A text; null is an empty one."""
    if value is not None and not isinstance(value, str):
        raise invalid(name, "a string")
    return value or ""


def limit(fields: Mapping[str, Any], *names: str, prefix: str = "") -> int | None:
    """The number of tokens that a client wants at most: the first of these fields that is there."""
    for name in names:
        value: Any = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value <= LARGEST_COUNT:
            raise invalid(f"{prefix}{name}", "a positive integer")
        return value
    return None


MAX_STOPS = 16


def stop_strings(value: Any, name: str) -> tuple[str, ...]:
    """Strings that end a turn."""
    stops = [value] if isinstance(value, str) else value
    entries = cast("list[Any]", stops) if isinstance(stops, list) else None if stops is not None else []
    if entries is None or len(entries) > MAX_STOPS or not all(isinstance(entry, str) for entry in entries):
        raise invalid(name, f"a string or a list of at most {MAX_STOPS} strings")
    return tuple(dict.fromkeys(entry for entry in cast("list[str]", entries) if entry))
