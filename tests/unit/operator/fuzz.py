"""Random jobs from the CRD's schema: valid specs, and specs with errors in them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from kestrl._shared.spec.crd import crd
from kestrl._shared.spec.load import parse_job
from kestrl.errors import UserInputError

Object = dict[str, Any]
SCHEMA: Object = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
DURATIONS = ("1s", "30s", "90s", "10m", "1h30m", "2d", "9999d", "0.5s", "250ms")
WORDS = (
    "a:b",
    "pkg.mod:Name",
    "hermes",
    "tool_agent",
    "s3://bucket/x",
    "all-linear",
    "cpu",
    "engine/logprob_gap",
    "*",
    "x",
)
FREE: tuple[Any, ...] = (
    {},
    {"text": "x" * 20_000},
    {"list": list(range(2000))},
    {"a": {"b": {"c": [None, True, 1.5]}}},
)
TRIES = 200


def valid(rng: random.Random, base: Mapping[str, Any]) -> Object:
    """A valid spec: the base with up to eight fields changed to other values that the schema allows, preferably its
    bounds."""
    spec = copy.deepcopy(dict(base))
    wanted = rng.randint(1, 8)
    for _ in range(TRIES):
        changed = copy.deepcopy(spec)
        _change(rng, SCHEMA, changed)
        try:
            parse_job(job_of(changed))
        except UserInputError:
            continue
        spec, wanted = changed, wanted - 1
        if not wanted:
            break
    return spec


def mutated(rng: random.Random, base: Mapping[str, Any]) -> Object:
    """A spec with up to three errors that no schema allows: wrong types, absurd sizes, too many or too few fields."""
    spec = copy.deepcopy(dict(base))
    for _ in range(rng.randint(1, 3)):
        parent, name = rng.choice(_places(spec))
        parent[name] = rng.choice(WRONG)(rng)
        if rng.random() < 0.2:
            del parent[name]
    return spec


def job_of(spec: object, name: str = "job", generation: int = 1) -> Object:
    uid = str(uuid5(NAMESPACE_OID, name))
    metadata = {"name": name, "namespace": "fuzz", "uid": uid, "generation": generation, "resourceVersion": "1"}
    return {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": metadata, "spec": spec}


WRONG: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: 10 ** rng.randint(3, 300),
    lambda rng: -rng.random(),
    lambda _: float("inf"),
    lambda _: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: "x" * rng.choice((0, 1, 100_000, 1_000_000)),
    lambda rng: [{}] * rng.choice((0, 1, 100_000)),
    lambda rng: {f"field-{number}": number for number in range(rng.choice((0, 1, 50_000)))},
    lambda _: _nested(100),
    lambda _: "\x00\ud800"[:1] + "$(KESTRL_INDEX){{ }}\n",
)


def _nested(depth: int) -> Object:
    made: Object = {}
    for _ in range(depth):
        made = {"in": made}
    return made


def _places(given: Any) -> list[tuple[Any, Any]]:
    """Every location in a spec, as its parent and its name or index there."""
    items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    found = [(given, name) for name, _ in items]
    return found + [place for _, value in items for place in _places(value)]


def _change(rng: random.Random, schema: Mapping[str, Any], given: Object) -> None:
    name = rng.choice(sorted(schema["properties"]))
    field = schema["properties"][name]
    inner = given.get(name)
    if "properties" in field and isinstance(inner, dict) and rng.random() < 0.9:
        _change(rng, field, inner)
    else:
        given[name] = _value(rng, field)


def _value(rng: random.Random, field: Mapping[str, Any]) -> Any:
    if "enum" in field:
        return rng.choice(field["enum"])
    match field.get("type"):
        case "integer":
            low, high = field.get("minimum", 0), field.get("maximum", 2**31 - 1)
            return rng.choice((low, high, rng.randint(low, high), min(high, low + rng.randint(0, 64))))
        case "number":
            return rng.choice((0.0, 1e-9, 0.5, 1.0, 1e9, rng.random()))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            size = rng.choice((0, 1, 3, field.get("maxItems", 3)))
            return [_value(rng, field["items"]) for _ in range(size)]
        case "object" if "properties" in field:
            needed = set(field.get("required", ()))
            names = [name for name in field["properties"] if name in needed or rng.random() < 0.5]
            return {name: _value(rng, field["properties"][name]) for name in names}
        case "string":
            return rng.choice(DURATIONS if "ms|s|m|h" in field.get("pattern", "") else WORDS)
        case _:
            return copy.deepcopy(rng.choice(FREE))
