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

A group is a trace with all its episodes, and a tenth of the groups are traced (`telemetry.tracedGroups`). With
`telemetry.tracedGroups: 1` a collector decides which of them to keep, by what became of their episodes. This keeps the
run's own trace, groups with a failed episode or a large advantage, groups with a low reward, and a hundredth of the
others:

```
processors:
  tail_sampling:
    decision_wait: 10m
    policies:
      - name: run
        type: ottl_condition
        ottl_condition:
          error_mode: ignore
          span: ['span.name == "kestrl.publish"']
      - name: failed
        type: ottl_condition
        ottl_condition:
          error_mode: ignore
          span: ['span.attributes["kestrl.failure.boundary"] != nil']
      - name: large-advantage
        type: ottl_condition
        ottl_condition:
          error_mode: ignore
          span: ['span.attributes["kestrl.advantage"] >= 1.0']
      - name: low-reward
        type: ottl_condition
        ottl_condition:
          error_mode: ignore
          span: ['span.attributes["kestrl.reward"] < 0.0']
      - name: some
        type: probabilistic
        probabilistic: {sampling_percentage: 1}
```

An advantage is known when a step trains on the episode, long after its span has ended. The learner then sends a span
`kestrl.advantage` in the trace of the group, so that `decision_wait` is longer than a step takes. Before that,
`kestrl.reward.distance` of `kestrl.episode` says how far a reward is from its group's mean.

`test_tail_sampling.py::test_a_collector_keeps_what_failed_and_what_is_learned_from` runs these lines in a collector.
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
