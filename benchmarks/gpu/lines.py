"""What a part reports: one JSON line a figure, and the table of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Self

Status = Literal["measured", "passed", "failed", "not run", "over time"]


class NotRun(Exception):
    """A part or a figure cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure, or why there is none."""

    part: str
    name: str
    status: Status
    value: float | None = None
    unit: str = ""
    reference: float | None = None
    """Figure of the peer or limit, from the same run but for what `against` says."""
    against: str = ""
    note: str = ""
    """Why it was not run or failed, or what the figure is of."""

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def text(self) -> str:
        """One line of JSON, without what is empty."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in (None, "")})


def figure(
    part: str, name: str, value: float, unit: str, *, reference: float | None = None, against: str = "", note: str = ""
) -> Line:
    return Line(
        part=part,
        name=name,
        status="measured",
        value=float(f"{value:.4g}"),
        unit=unit,
        reference=None if reference is None else float(f"{reference:.4g}"),
        against=against,
        note=note,
    )


def not_run(part: str, name: str, why: str) -> Line:
    return Line(part=part, name=name, status="not run", note=why)


def table(lines: Iterable[Line]) -> str:
    """The lines for people."""
    return "\n".join(_row(line) for line in lines)


def _row(line: Line) -> str:
    value = "" if line.value is None else f"{line.value:g} {line.unit}"
    ratio = ""
    if line.value is not None and line.reference:
        ratio = f"{line.value / line.reference:.2f} x {line.against} ({line.reference:g})"
    return f"{line.part}  {line.name:<56} {line.status:<9} {value:<22} {ratio or line.note}".rstrip()
