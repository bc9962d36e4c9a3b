"""Generates docs/telemetry.md from `kestrl._shared.telemetry.names`: spans, attributes, events and metrics.

With `--check` it reports a stale page.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from kestrl._shared.telemetry import names
from kestrl._shared.telemetry.names import Instrument, Metric

PAGE = Path(__file__).parents[1] / "docs" / "telemetry.md"
HEAD = """# OpenTelemetry

For those who collect traces and metrics of KestRL, and write alerts and dashboards.

Set `telemetry.otlp` in the manifest, or the standard `OTEL_*` variables, and every process sends spans and metrics;
each also serves its metrics for Prometheus, on a port that `kestrl status` shows. `make gen` writes this page from
`src/kestrl/_shared/telemetry/names.py`.
"""
TAIL = """## Tail sampling

A run is one trace, and a tenth of its groups are in it (`telemetry.tracedGroups`). A collector's `tail_sampling`
decides on whole traces, which are whole runs here; what keeps the episodes that are worth looking at is its `filter`.
With `telemetry.tracedGroups: 1`, this drops the spans of episodes that did not fail and whose reward is within 0.1 of
the mean of their group:

```
processors:
  filter/episodes:
    error_mode: ignore
    traces:
      span:
        - >-
          name == "kestrl.episode"
          and attributes["kestrl.failure.boundary"] == nil
          and attributes["kestrl.reward.distance"] < 0.1
```

The spans of their calls stay. `kestrl.reward.distance` is the size of the advantage as far as a group alone decides on
it; the algorithm's own is computed in the step and stands in the [table of episodes](episodes.md), which has the
trace's id. Of whole groups `kestrl.score` has `kestrl.reward.lowest` and `kestrl.reward.highest`: where they are equal
nothing is learned.
"""


def meanings(kind: str) -> Iterator[tuple[str, str]]:
    """The names of a class with the texts below them."""
    tree = ast.parse(Path(names.__file__).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    for node, following in pairwise(body):
        match node, following:
            case ast.Assign(value=ast.Constant(value=name)), ast.Expr(value=ast.Constant(value=meaning)):
                yield str(name), " ".join(str(meaning).split())
            case _:
                pass


def metrics() -> Iterator[tuple[str, ...]]:
    for instrument in vars(Metric).values():
        if isinstance(instrument, Instrument):
            labels = ", ".join(f"`{label}`" for label in instrument.labels)
            kind = "counter" if instrument.counts else "gauge"
            meaning = f"{instrument.description}; `{instrument.prometheus}`"
            yield f"`{instrument.name}`", kind, f"`{instrument.unit}`", labels, meaning


def table(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rest)) + "\n"


def page() -> str:
    """The page."""
    tree = [line.rstrip() for line in (names.SpanName.__doc__ or "").splitlines()[1:] if line.strip()]
    shown = "\n".join(line.removeprefix("    ") for line in tree if ">" in line)
    named = [
        (title, [(f"`{name}`", meaning) for name, meaning in meanings(kind)])
        for title, kind in (("Spans", "SpanName"), ("Attributes", "Attr"), ("Events", "EventName"))
    ]
    parts = [HEAD]
    for title, rows in named:
        parts += [f"## {title}\n", *([f"```\n{shown}\n```\n"] if title == "Spans" else [])]
        parts.append(table(("name", "meaning"), *rows))
    parts += ["## Metrics\n", "The meaning ends with the name for Prometheus.\n"]
    parts += [table(("name", "kind", "unit", "labels", "meaning"), *metrics()), TAIL]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if page() != PAGE.read_text(encoding="utf-8"):
        print(f"{PAGE} is stale: make gen")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
