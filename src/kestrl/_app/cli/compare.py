"""The command `kestrl compare`: two stored evaluations side by side, and the questions that flipped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kestrl._app.cli.options import DEFAULT_RUNS, AsJson, Runs
from kestrl._app.comparison.differing import differing_fields
from kestrl._app.comparison.flips import Flip, flip_metric, flips
from kestrl._app.comparison.stored import EvaluationName, StoredEvaluation, check_same_questions, read_evaluation
from kestrl._app.local.comparison import PolicyEvaluation, against_first, as_json, remarks, tables, values
from kestrl.terminal import safe_line

console = Console()
LONGEST_QUESTION = 100
ONE_HELP = "RUN or RUN@STEP: a run id, folder or address, and a step after which it was evaluated (default: its last)."


def compare(
    one: Annotated[str | None, typer.Argument(help=f"{ONE_HELP} Default: the latest run.", show_default=False)] = None,
    other: Annotated[
        str | None,
        typer.Argument(
            help="The same. Without it, the first evaluation of RUN is compared with ONE.", show_default=False
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="Questions to print that flipped, at most.")] = 10,
    print_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare two stored evaluations: means, a paired test over the questions, and the questions that flipped.

    It reads what runs stored and starts nothing. Evaluations of `kestrl eval` are named by their folders.
    """
    first = EvaluationName.parse(one)
    if other is None:
        sides = (read_evaluation(runs, EvaluationName(first.run, None), first=True), read_evaluation(runs, first))
    else:
        sides = (read_evaluation(runs, first), read_evaluation(runs, EvaluationName.parse(other)))
    before, after = (side.evaluation for side in sides)
    check_same_questions(before, after)
    metric = flip_metric(values(before), values(after))
    flipped = flips(before.groups, after.groups, metric)
    if print_json:
        typer.echo(json.dumps(_as_json((before, after), metric, flipped), indent=2))
        return
    for part in tables(console, (before, after)):
        console.print(part)
    for line in (*_job_warnings(*sides), *remarks((before, after)), *_flip_lines(metric, flipped, most)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if flipped and sides[0].run is not None and sides[1].run == sides[0].run:
        console.print(_next_command(flipped[0], sides[0].run.id, runs), soft_wrap=True, highlight=False, markup=False)


def _as_json(evaluations: Sequence[PolicyEvaluation], metric: str, flipped: Sequence[Flip]) -> dict[str, object]:
    pairs = dict(against_first(evaluations))
    return {
        "evaluations": [as_json(evaluation, pairs.get(evaluation.label)) for evaluation in evaluations],
        "metric": metric,
        "flips": [asdict(flip) for flip in flipped],
    }


def _job_warnings(one: StoredEvaluation, other: StoredEvaluation) -> Iterator[str]:
    """A warning where the two jobs score or play differently, so that equal numbers do not mean the same."""
    if one.run is None or other.run is None or one.run.path == other.run.path:
        return
    if differing := differing_fields(one.run.job(), other.run.job()):
        yield safe_line(
            f"warning: the jobs of {one.evaluation.label} and {other.evaluation.label} differ in {', '.join(differing)}"
        )


def _flip_lines(metric: str, flipped: Sequence[Flip], limit: int) -> Iterator[str]:
    worse = sum(flip.difference < 0 for flip in flipped)
    yield f"questions whose {metric} differs: {len(flipped)}, of which {worse} became worse"
    for flip in flipped[:limit]:
        question = " ".join(flip.question.split())
        excerpt = question if len(question) <= LONGEST_QUESTION else question[:LONGEST_QUESTION] + " ..."
        yield safe_line(f"{flip.before:.3f} -> {flip.after:.3f}  {flip.scenario}: {excerpt}")
        yield safe_line(f"  {' '.join(flip.episodes_before)} -> {' '.join(flip.episodes_after)}")
    if len(flipped) > limit:
        yield f"and {len(flipped) - limit} more (--most, --json)"


def _next_command(flip: Flip, run: str, runs: Path) -> str:
    pair = [flip.episodes_before[0], flip.episodes_after[0], "--run", run, "--runs", str(runs)]
    return f"see why: {shlex.join(['kestrl', 'episodes', 'diff', *pair])}"


def register(app: typer.Typer) -> None:
    app.command()(compare)
