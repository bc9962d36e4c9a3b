"""The result of the check of a manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kestrl.errors import SeveralProblems


@dataclass(slots=True)
class Findings:
    """Result of the check of a manifest."""

    problems: list[str] = field(default_factory=list[str])
    """Problems that prevent a run. Each names the field, or file, row and field, and the fix."""
    warnings: list[str] = field(default_factory=list[str])
    """Warnings; the job can run."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Valid rows by data set."""
    unit: str = "scenarios"
    """What a row of a data set is; empty where its name says so."""
    servers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Offered tools of each server, by its name."""

    @property
    def summary(self) -> str:
        """What is valid, for a person."""
        counts = [f"{count} {name} {self.unit}".rstrip() for name, count in self.rows.items()]
        return ", ".join([*counts, *(f"{name} offers {', '.join(tools)}" for name, tools in self.servers.items())])

    def as_json(self) -> dict[str, Any]:
        """All findings, for programs."""
        return {"valid": not self.problems, **asdict(self)}

    def raise_problems(self) -> None:
        """Raises SeveralProblems, if there are any."""
        if self.problems:
            raise SeveralProblems(self.problems)
