"""Evaluations of several policies side by side: their metrics, and what each did about every question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kestrl.episode import Episode, Group
from kestrl.local.files import write_atomic
from kestrl.local.report import ROWS, transcript
from kestrl.terminal import safe, safe_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One policy's evaluation."""

    label: str
    """The policy as the user named it."""
    policy: str
    """Its full name, or the model's."""
    means: Mapping[str, float]
    groups: Sequence[Group]
    """One episode of each question; empty if they are not needed."""
    folder: Path


def table(evaluations: Sequence[Evaluation]) -> Table:
    """Metrics of every policy, in columns."""
    shown = Table("held-out")
    for evaluation in evaluations:
        shown.add_column(Text(safe_line(evaluation.label)), justify="right")
    names = {name for evaluation in evaluations for name in evaluation.means}
    for name in (*(name for name in ROWS if name in names), *sorted(names - set(ROWS))):
        values = (evaluation.means.get(name) for evaluation in evaluations)
        shown.add_row(Text(safe_line(name)), *("-" if value is None else f"{value:.3f}" for value in values))
    return shown


def details(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Lines about every question: what it is, and the conversation of each policy."""
    by_scenario: dict[str, list[tuple[str, Group]]] = {}
    for evaluation in evaluations:
        for group in evaluation.groups:
            by_scenario.setdefault(group.scenario.id, []).append((evaluation.label, group))
    for scenario, attempts in by_scenario.items():
        first = attempts[0][1]
        question = next((message for message in reversed(first.scenario.messages) if message["role"] == "user"), None)
        yield safe_line(f"{scenario}: {question['content'] if question else ''}")
        yield safe(f"  ground truth: {json.dumps(first.scenario.ground_truth, ensure_ascii=False)}")
        for label, group in attempts:
            for episode in group.episodes:
                yield safe_line(f"  {label}:{_metrics(episode)}")
                yield from (f"  {line}" for line in transcript(episode))
        yield ""


def _metrics(episode: Episode) -> str:
    return "".join(f" {name} {value:g}" for name, value in sorted(episode.metrics.items()) if name in ROWS)


def report(console: Console, evaluations: Sequence[Evaluation], out: Path, *, with_details: bool) -> None:
    """Prints the comparison and keeps it as JSON."""
    if with_details:
        for line in details(evaluations):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(table(evaluations))
    write_atomic(out, json.dumps([as_json(evaluation) for evaluation in evaluations], indent=2))
    console.print(str(out), soft_wrap=True, markup=False)


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything but the conversations, which are stored beside the evaluation."""
    return {
        "label": evaluation.label,
        "policy": evaluation.policy,
        "means": dict(evaluation.means),
        "folder": str(evaluation.folder),
    }
