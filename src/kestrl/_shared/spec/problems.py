"""Problems of a manifest."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """A problem of a manifest."""

    path: str
    """Field path such as spec.algorithm.groupSize."""
    message: str
    """What is wrong and how to fix it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"
