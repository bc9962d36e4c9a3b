"""YAML from outside: manifests, rulers, configuration and OpenAPI documents are read here and nowhere else.

A document is measured before anything is built from it: aliases and merge keys repeat what they name, so that a few
hundred bytes may stand for billions of values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_NESTING = 200
"""Maximum levels of a document: it is composed recursively, and more end the process."""
MAX_REPEATED = 100_000
"""Maximum values that aliases and merge keys repeat."""
MAX_NUMBER = 1000
"""Maximum characters of a number: some forms take time quadratic in them."""
_NUMBER = re.compile(r"[-+0-9a-fA-FoxX:._]+")


class YamlRefused(yaml.YAMLError):
    """The document is too large for what it says; the message says why."""


@dataclass(slots=True)
class _Measure:
    """Sizes of the anchored parts of a document."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    open: list[tuple[str | None, int]] = field(default_factory=list[tuple[str | None, int]])
    """Anchor and size so far of the collections that have begun."""
    repeated: int = 0

    def add(self, event: Any) -> None:
        """Counts an event; raises YamlRefused."""
        match event:
            case yaml.AliasEvent(anchor=anchor):
                size = self._named(anchor or "")
                self.repeated += size
                if self.repeated > MAX_REPEATED:
                    raise YamlRefused(f"its aliases repeat more than {MAX_REPEATED} values")
                self._grow(size)
            case yaml.ScalarEvent(anchor=anchor, value=value):
                if len(value) > MAX_NUMBER and not event.style and _NUMBER.fullmatch(value):
                    raise YamlRefused(f"it has a number of more than {MAX_NUMBER} characters")
                if len(value) > MAX_NUMBER and (event.tag or "").rpartition(":")[2] in ("int", "float"):
                    raise YamlRefused(f"it has a number of more than {MAX_NUMBER} characters")
                self._end(anchor, 1)
            case yaml.CollectionStartEvent(anchor=anchor):
                self.open.append((anchor, 1))
                if len(self.open) > MAX_NESTING:
                    raise YamlRefused(f"it has more than {MAX_NESTING} levels")
            case yaml.CollectionEndEvent():
                self._end(*self.open.pop())
            case _:
                pass

    def _named(self, anchor: str) -> int:
        if any(anchor == name for name, _ in self.open):
            raise YamlRefused(f"the alias *{anchor[:80]} is within what it names")
        return self.sizes.get(anchor, 0)  # an unknown one is refused by the composer, with its place

    def _end(self, anchor: str | None, size: int) -> None:
        if anchor is not None:
            self.sizes[anchor] = size
        self._grow(size)

    def _grow(self, size: int) -> None:
        if self.open:
            anchor, before = self.open[-1]
            self.open[-1] = (anchor, before + size)


def read_all(text: str, loader: Any = yaml.SafeLoader) -> list[Any]:
    """The documents of a text.

    Args:
        text: The text.
        loader: A loader of plain values.

    Raises:
        yaml.YAMLError: It is not YAML, or too large for what it says (`YamlRefused`).
        ValueError: It has a date or a number that there is not.
    """
    measure = _Measure()
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.DocumentStartEvent):
            measure = _Measure(repeated=measure.repeated)
        measure.add(event)
    return list(yaml.load_all(text, loader))


def read(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """The one document of a text, None for an empty one; arguments and errors are as for `read_all`."""
    documents = read_all(text, loader)
    if len(documents) > 1:
        raise YamlRefused(f"it holds {len(documents)} documents; one is expected")
    return documents[0] if documents else None
