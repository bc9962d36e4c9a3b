"""Problems of a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kestrl.errors import SeveralProblems

LONGEST_SHOWN = 200
"""Characters of a value that a message shows."""


class Problem(NamedTuple):
    """A problem of a manifest."""

    path: str
    """Field path such as spec.algorithm.groupSize."""
    message: str
    """What is wrong and how to fix it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ProblemsError(SeveralProblems):
    """An invalid manifest, with all problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__([str(problem) for problem in problems])
        self.problems = tuple(problems)
