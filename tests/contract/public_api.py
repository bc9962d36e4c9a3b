"""The public API as lines of text, one for each name, and what changed between two of them."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

MODULES = (
    "kestrl",
    "kestrl.agents",
    "kestrl.algorithms",
    "kestrl.data",
    "kestrl.episode",
    "kestrl.errors",
    "kestrl.formats",
    "kestrl.metric_sinks",
    "kestrl.rewards",
    "kestrl.rewards.builtin",
    "kestrl.storage",
    "kestrl.testing.algorithms",
    "kestrl.testing.attempts",
    "kestrl.testing.formats",
    "kestrl.testing.metric_sinks",
    "kestrl.tools",
    "kestrl.tools.schema",
)
"""Modules that users import."""


def public_api() -> dict[str, str]:
    """Signature or kind of every public name, by the name."""
    return {name: text for module in MODULES for name, text in _module(importlib.import_module(module))}


def differences(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What may break code that uses the recorded API, for people.

    Added names are none of it, nor are added parameters with a default and defaults that parameters got.
    """
    common = recorded.keys() & found.keys()
    changed = [name for name in common if not _compatible(recorded[name], found[name])]
    return [
        *(f"removed: {name}{recorded[name]}" for name in sorted(recorded.keys() - found.keys())),
        *(f"changed: {name}{recorded[name]} is now {name}{found[name]}" for name in sorted(changed)),
        *(
            f"new parameter without a default: {name}{found[name]}"
            for name in sorted(found.keys() - recorded.keys())
            if name.endswith(")") and name.partition("(")[0] in recorded and " = " not in found[name]
        ),
    ]


def _compatible(before: str, after: str) -> bool:
    return after == before or (" = " not in before and after.startswith(f"{before} = "))


def _module(module: ModuleType) -> Iterator[tuple[str, str]]:
    names: Any = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        yield from _value(f"{module.__name__}.{name}", getattr(module, name))


def _value(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if inspect.isclass(value):
        yield from _class(name, value)
    elif inspect.isroutine(value):
        yield from _callable(name, value)
    else:
        yield name, f": {value if isinstance(value, str) else type(value).__name__}"


def _class(name: str, kind: type[Any]) -> Iterator[tuple[str, str]]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield name, f": class{bases and ' of '}{bases}"
    if issubclass(kind, enum.Enum):
        yield from ((f"{name}.{member.name}", f": {member.value!r}") for member in kind)
        return
    if not getattr(kind, "_is_protocol", False):
        yield from _parameters(name, kind)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set[str]()
    for member, hint in inspect.get_annotations(kind).items():
        if not member.startswith("_") and member not in fields:
            yield f"{name}.{member}", f": {hint}"
    for member, value in vars(kind).items():
        if member.startswith("_") and member not in ("__call__", "__enter__", "__aenter__"):
            continue
        if isinstance(value, property):
            yield f"{name}.{member}", f": {inspect.signature(value.fget or property).return_annotation}"
        elif isinstance(value, classmethod | staticmethod):
            yield from _callable(f"{name}.{member}", getattr(kind, member))
        elif inspect.isfunction(value):
            yield from _callable(f"{name}.{member}", value)


def _callable(name: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = "async function" if inspect.iscoroutinefunction(value) else "function"
    yield name, f": {kind} -> {inspect.signature(value).return_annotation}"
    yield from _parameters(name, value)


def _parameters(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A line for each parameter; of those that may be given by position with the position."""
    try:
        parameters = inspect.signature(value).parameters
    except ValueError:
        return  # a built-in constructor
    for position, (parameter, found) in enumerate(parameters.items()):
        place = f"{position} " if found.kind <= found.POSITIONAL_OR_KEYWORD else ""
        hint = "" if found.annotation is found.empty else found.annotation
        default = "" if found.default is found.empty else f" = {found.default!r}"
        stars = {found.VAR_POSITIONAL: "*", found.VAR_KEYWORD: "**"}.get(found.kind, "")
        default = default or (" = ()" if stars else "")
        text = re.sub(r"<([\w.]+)[^<>]* at 0x[0-9a-f]+>", r"<\1>", f": {place}{hint}{default}".rstrip())
        yield f"{name}({stars}{parameter})", text


def written(lines: Mapping[str, str]) -> str:
    """The text of a snapshot."""
    return "".join(f"{name}\t{text}\n" for name, text in sorted(lines.items()))


def read(text: str) -> dict[str, str]:
    """A snapshot from its text."""
    return dict(line.split("\t", 1) for line in text.splitlines())
