"""Parses Google-style docstrings for the model: description of the tool and of each argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?|Attributes|Warnings?|See Also):\s*$"
)
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_ARGUMENTS = {"Args", "Arguments", "Parameters"}


@dataclass(frozen=True, slots=True)
class Docstring:
    """Parsed parts of a docstring."""

    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict[str, str])


def parse(text: str | None) -> Docstring:
    """Parses a docstring. Text outside known sections belongs to the description."""
    description: list[str] = []
    arguments: list[str] = []
    into = description
    for line in inspect.cleandoc(text or "").splitlines():
        head = _SECTION.match(line)
        if head is None:
            into.append(line)
        else:
            # Other sections (Returns, Raises, ...) are for programmers and are skipped.
            into = arguments if head.group(1) in _ARGUMENTS else []
    return Docstring("\n".join(description).strip(), _entries(arguments))


def _entries(lines: list[str]) -> dict[str, str]:
    """`name: text` or `name (type): text`, where deeper lines continue the text."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc("\n".join(lines)).splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            name = entry.group(1)
            found[name] = entry.group(2).strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
