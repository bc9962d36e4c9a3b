"""Evaluations of several policies side by side: their metrics, and what each did about every question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kestrl._app.local.files import write_atomic
from kestrl._app.local.report import ROWS, transcript
from kestrl._app.local.uncertainty import (
    TESTED,
    Paired,
    Values,
    different_questions,
    pairs_of,
    standard_error,
    values_of,
)
from kestrl.episode import Episode, Group
from kestrl.runstate.sampling import GREEDY, EvaluationSampling
from kestrl.terminal import safe, safe_line

ESTIMATES = ("mean", "maj", "pass", "best")
"""Estimates over several samples of a question, in the order of the table."""
WIDEST = 100_000
"""Characters of a line that no table reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvaluation:
    """One policy's evaluation."""

    label: str
    """The policy as the user named it."""
    policy: str
    """Its full name, or the model's."""
    means: Mapping[str, float]
    groups: Sequence[Group]
    """The episodes of each question; empty if they are not needed."""
    folder: Path | str
    """Where its episodes are stored: a folder, or an address."""
    sampling: EvaluationSampling = GREEDY
    """How its episodes were sampled."""
    seed: int | None = None
    """Seed of their sampling; None if there is none."""
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Failures by `boundary/code`."""
    changed_servers: Sequence[str] = ()
    """Tool servers that list other tools than in the run that trained the policy."""


def values(evaluation: PolicyEvaluation) -> Mapping[str, Values]:
    """Every metric's value of each question."""
    return values_of(evaluation.groups, evaluation.sampling.samples)


def table(evaluations: Sequence[PolicyEvaluation]) -> Table:
    """Metrics of every policy, in columns, with the standard errors of those that are means over questions."""
    metrics_table = Table(_title(evaluations[0]))
    for evaluation in evaluations:
        metrics_table.add_column(Text(safe_line(evaluation.label)), justify="right", overflow="fold")
    of = [values(evaluation) for evaluation in evaluations]
    names = {name for evaluation in evaluations for name in evaluation.means}
    for name in (*(name for name in ROWS if name in names), *sorted(names - set(ROWS), key=_place)):
        cells = (
            _cell(evaluation.means.get(name), by.get(name)) for evaluation, by in zip(evaluations, of, strict=True)
        )
        metrics_table.add_row(Text(safe_line(name)), *cells)
    return metrics_table


def tables(console: Console, evaluations: Sequence[PolicyEvaluation]) -> Iterator[Table]:
    """The table in parts that fit the console, each with as many policies as have room."""
    begin = 0
    while begin < len(evaluations):
        end = begin + 1
        while end < len(evaluations) and _fits(console, evaluations[begin : end + 1]):
            end += 1
        yield table(evaluations[begin:end])
        begin = end


def _fits(console: Console, evaluations: Sequence[PolicyEvaluation]) -> bool:
    unbounded = console.options.update(max_width=WIDEST)
    return Measurement.get(console, unbounded, table(evaluations)).maximum <= console.width


def _cell(mean: float | None, by_question: Values | None) -> str:
    error = None if by_question is None else standard_error(by_question)
    return "-" if mean is None else f"{mean:.3f}" + ("" if error is None else f" ±{error:.3f}")


def _title(evaluation: PolicyEvaluation) -> str:
    return "held-out" if evaluation.sampling == GREEDY else f"held-out, {evaluation.sampling}"


def _place(name: str) -> tuple[bool, int, int, str]:
    """Order of the rows: estimates such as pass@4 first, by kind and number."""
    kind, _, k = name.partition("@")
    is_estimate = kind in ESTIMATES and k.isdigit()
    return not is_estimate, ESTIMATES.index(kind) if is_estimate else 0, int(k) if is_estimate else 0, name


def remarks(evaluations: Sequence[PolicyEvaluation]) -> Iterator[str]:
    """Lines about policies that failed in episodes, had other tools than in training, or were sampled differently, and
    how they differ from the first one on the same questions.
    """
    for evaluation in evaluations:
        label = safe_line(evaluation.label)
        if evaluation.sampling != evaluations[0].sampling:
            yield f"{label}: {evaluation.sampling}"
        if evaluation.failures:
            failures = ", ".join(f"{name} {count}" for name, count in sorted(evaluation.failures.items()))
            yield safe_line(f"{label}: failures, which are in no mean: {failures}")
        if evaluation.changed_servers:
            servers = ", ".join(evaluation.changed_servers)
            yield safe_line(f"warning: {label}: spec.tools: {servers}: the server lists other tools than in training")
    for label, pairs in against_first(evaluations):
        for name, pair in pairs.items():
            yield safe_line(f"{label} against {evaluations[0].label}: {name} {pair}")
        yield from map(safe_line, different_questions(pairs, evaluations[0].label, label))


def against_first(evaluations: Sequence[PolicyEvaluation]) -> Iterator[tuple[str, Mapping[str, Paired]]]:
    """Every policy but the first, with its differences from that one; policies without stored episodes are left out."""
    first = values(evaluations[0])
    for evaluation in evaluations[1:]:
        pairs = pairs_of(first, values(evaluation), TESTED)
        if pairs:
            yield evaluation.label, pairs


def details(evaluations: Sequence[PolicyEvaluation]) -> Iterator[str]:
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
                answer = "" if episode.answer is None else f" answer {episode.answer!r}"
                yield safe_line(f"  {label}:{_metrics(episode)}{answer}")
                yield from (f"  {line}" for line in transcript(episode))
        yield ""


def _metrics(episode: Episode) -> str:
    return "".join(f" {name} {value:g}" for name, value in sorted(episode.metrics.items()) if name in ROWS)


def report(
    console: Console,
    evaluations: Sequence[PolicyEvaluation],
    out: Path,
    *,
    with_details: bool,
    print_json: bool = False,
) -> None:
    """Prints the comparison, or the JSON that it keeps of it."""
    pairs = dict(against_first(evaluations))
    document = json.dumps([as_json(evaluation, pairs.get(evaluation.label)) for evaluation in evaluations], indent=2)
    write_atomic(out, document)
    if print_json:
        console.print(document, soft_wrap=True, highlight=False, markup=False)
        return
    if with_details:
        for line in details(evaluations):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for part in tables(console, evaluations):
        console.print(part)
    for line in remarks(evaluations):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(str(out), soft_wrap=True, markup=False)


def as_json(evaluation: PolicyEvaluation, against_first: Mapping[str, Paired] | None = None) -> dict[str, Any]:
    """Everything but the conversations, which are stored beside the evaluation."""
    errors = {name: standard_error(by_question) for name, by_question in values(evaluation).items()}
    return {
        "label": evaluation.label,
        "policy": evaluation.policy,
        "means": dict(evaluation.means),
        "standard_errors": {name: error for name, error in errors.items() if error is not None},
        "against_first": {name: asdict(pair) for name, pair in (against_first or {}).items()},
        "folder": str(evaluation.folder),
        **evaluation.sampling.model_dump(),
        "seed": evaluation.seed,
        "failures": dict(evaluation.failures),
        "changed_servers": list(evaluation.changed_servers),
    }
