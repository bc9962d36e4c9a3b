"""The form of a case, and the table that cases are entered in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kestrl.testing.gateway.seam import Subject

Check = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of the suite."""

    number: int
    title: str
    check: Check | None = None
    """A small program; it raises AssertionError with what does not hold."""
    elsewhere: str = ""
    """Why there is no program, and what shows the property."""


class Table:
    """Cases by number."""

    def __init__(self) -> None:
        self.cases: dict[int, Case] = {}

    def case(self, *numbers: int, title: str) -> Callable[[Check], Check]:
        """Enters a program, under several numbers where one shows them all."""

        def enter(check: Check) -> Check:
            for number in numbers:
                self._enter(Case(number=number, title=title, check=check))
            return check

        return enter

    def elsewhere(self, number: int, title: str, reason: str) -> None:
        """Enters a case that no offline program shows."""
        self._enter(Case(number=number, title=title, elsewhere=reason))

    def _enter(self, case: Case) -> None:
        assert case.number not in self.cases, f"case {case.number} is entered twice"
        self.cases[case.number] = case
