"""The fields of the CustomResourceDefinition with their constraints, and which changes refuse manifests of before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Fields = Mapping[str, Mapping[str, Any]]
"""Constraints of every field by its path, such as `spec.tools[].name`."""

UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
SAME = ("type", "format", "pattern", "default", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")
"""Constraints of which no change is known to be harmless, but for the removal of those of `LIFTED`."""
LIFTED = ("type", "pattern")
"""Without them a field takes what it took before, and more."""


def fields_of(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of an OpenAPI schema with its constraints."""
    if path:
        rules = sorted(rule["rule"] for rule in schema.get("x-kubernetes-validations", ()))
        own = {key: schema[key] for key in (*UPPER, *LOWER, *SAME, "enum", "required") if key in schema}
        if isinstance(own.get("default"), Mapping):
            del own["default"]  # it repeats those of the fields within
        yield path, own | ({"rules": rules} if rules else {})
    for name, inner in schema.get("properties", {}).items():
        yield from fields_of(inner, f"{path}.{name}".lstrip("."))
    if isinstance(schema.get("items"), Mapping):
        yield from fields_of(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from fields_of(schema["additionalProperties"], f"{path}{{}}")


def narrowed(before: Fields, after: Fields) -> list[str]:
    """Changes by which an object of before may be refused or read differently; added fields are none."""
    found: list[str] = []
    for path, old in before.items():
        if path not in after:
            found.append(f"{path}: removed")
        else:
            found += [f"{path}: {what}" for what in _narrowed(old, after[path])]
    return found


def _narrowed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in SAME:
        if old.get(key) != new.get(key) and not (key in LIFTED and key not in new):
            yield f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
    for key in UPPER:
        if key in new and new[key] < old.get(key, float("inf")):
            yield f"{key} was {old.get(key)}, is {new[key]}"
    for key in LOWER:
        if key in new and new[key] > old.get(key, float("-inf")):
            yield f"{key} was {old.get(key)}, is {new[key]}"
    if "enum" in new and "enum" not in old:
        yield f"only {', '.join(map(str, new['enum']))} are allowed now"
    gone = [each for each in old.get("enum", ()) if each not in new.get("enum", (each,))]
    if gone:
        yield f"enum lost {', '.join(map(str, gone))}"
    for name in new.get("required", ()):
        if name not in old.get("required", ()):
            yield f"{name} is required now"
    for rule in new.get("rules", ()):
        if rule not in old.get("rules", ()):
            yield f"has the new rule {rule}"
