"""Output of benchmarks: one JSON object per row with `--json`, otherwise one line per row. Value and reference are from
the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure and its reference."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    """Figure of the peer or limit, from the same run."""
    against: str = ""
    """Name of the peer or limit."""

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference if self.reference else None


def main(
    description: str | None, measure: Callable[[], Iterable[Row]], quick: Callable[[], Iterable[Row]] | None = None
) -> None:
    """Runs a benchmark from the command line.

    Args:
        description: Of the benchmark.
        measure: The rows of a whole run.
        quick: Those of a run in small sizes, which proves the benchmark and measures nothing; None if it has none.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="small sizes, in a minute or two")
    arguments = parser.parse_args()
    for row in quick() if quick is not None and arguments.quick else measure():
        print_row(row, as_json=arguments.json)


def print_row(row: Row, *, as_json: bool) -> None:
    """Prints a row."""
    if as_json:
        print(json.dumps({**asdict(row), "ratio": row.ratio}), flush=True)
        return
    beside = ""
    if row.ratio is not None:
        beside = f"   {row.ratio:.2f} x {row.against} ({row.reference:.4g})"
    elif row.reference is not None:
        beside = f"   {row.against} {row.reference:.4g}"
    print(f"{row.name:<58} {row.value:>10.4g} {row.unit}{beside}", flush=True)
