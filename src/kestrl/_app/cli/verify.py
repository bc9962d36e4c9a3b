"""The command `kestrl verify`: runs a job for every seed of a threshold, and judges the plateaus of its evaluations."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kestrl._app.checks.thresholds import threshold_problems
from kestrl._app.cli.options import DEFAULT_RUNS, AsJson, Overrides, Runs
from kestrl._app.cli.sft import fine_tuned
from kestrl._app.comparison.differing import differing_fields
from kestrl._app.comparison.verdict import EvaluationCurve, SeedVerdict, ThresholdVerdict, judge
from kestrl._app.local.files import write_atomic
from kestrl._app.local.observation import run_store
from kestrl._app.local.rundir import RunDir, cache_folder, find_run, open_run, runs_of
from kestrl._app.local.runner import RunOptions, run_job
from kestrl._app.local.uncertainty import Values, different_questions, values_of
from kestrl._shared.conventions import EXIT_FAILED
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl._shared.spec.threshold import Threshold, ThresholdSpec, read_threshold
from kestrl.episode import Purpose
from kestrl.errors import PlaceError, SeveralProblems, StorageError, UserInputError
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl.terminal import safe

console = Console()
errors = Console(stderr=True)


def verify(
    threshold: Annotated[Path, typer.Argument(help="The Threshold file.", show_default=False)],
    run_ids: Annotated[
        list[str] | None, typer.Option("--run", help="Judge this finished run and start none; repeatable.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Run again, also the seeds that have finished.")] = False,
    print_json: AsJson = False,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Run a job for every seed, and judge it by a published number. Exit code 0 if it is reached, 1 if it is not.

    The same command again resumes: finished runs are not repeated, an interrupted one goes on.
    """
    parsed_threshold = read_threshold(threshold)
    base = threshold.resolve().parent
    overrides = tuple(set_ or ())
    if run_ids:
        job = read_job(base / parsed_threshold.spec.job, overrides)
        run_folders = [find_run(runs, run_id) for run_id in dict.fromkeys(run_ids)]
        for run in run_folders:
            _warn_of_differences(job, run)
    else:
        run_folders = _run_all(
            parsed_threshold.spec, base, runs, overrides, new=new, progress=errors if print_json else console
        )
    verdict = judge(parsed_threshold.spec, [curve_of(run, parsed_threshold.spec) for run in run_folders])
    place = runs / "verify" / f"{parsed_threshold.metadata.name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    document = json.dumps({"passed": verdict.passed, **asdict(verdict)}, indent=2)
    write_atomic(place, document)
    if print_json:
        typer.echo(document)
    else:
        _print(parsed_threshold, verdict)
        console.print(str(place), soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(0 if verdict.passed else EXIT_FAILED)


def curve_of(run: RunDir, spec: ThresholdSpec) -> EvaluationCurve:
    """The evaluations of a run, with the metric's values of each question in those that are compared.

    Raises:
        UserInputError: It has not succeeded.
    """
    if not run.succeeded():
        raise UserInputError(f"--run: {run.id} has not succeeded, so it has no plateau; see `kestrl status {run.id}`")
    summary = run.summary()
    evaluations = () if summary is None else summary.evaluations
    return EvaluationCurve(
        run=run.id,
        seed=run.job().spec.data.seed,
        evaluations=evaluations,
        values=_values(
            run, spec, {0, *(int(evaluation["step"]) for evaluation in evaluations[-spec.plateau.evaluations :])}
        ),
    )


def _values(run: RunDir, spec: ThresholdSpec, steps: Collection[int]) -> dict[int, Values]:
    """The metric of each question in the evaluations of some steps; nothing where their episodes are not stored."""
    summary, values = run.summary(), dict[int, Values]()
    samples = 1 if summary is None or summary.sampling is None else summary.sampling.samples
    try:
        episodes = ObjectEpisodeStore(run_store(run))
        for step in sorted(steps):
            values[step] = values_of(episodes.read(Purpose.EVALUATION, step).groups, samples).get(spec.metric, {})
    except (StorageError, PlaceError) as error:
        errors.print(safe(f"{run.id}: no standard errors: {error}"), markup=False, soft_wrap=True)
    return values


def _run_all(
    spec: ThresholdSpec, base: Path, runs: Path, overrides: Sequence[str], *, new: bool, progress: Console
) -> list[RunDir]:
    jobs = [_job_of(spec, base, seed, overrides) for seed in spec.seeds]  # a bad manifest is reported before SFT
    if problems := [f"{spec.job}: {problem}" for problem in threshold_problems(spec, jobs[0])]:
        raise SeveralProblems(problems)
    if spec.sft is not None:
        overrides = (*overrides, fine_tuned(base / spec.sft, (), runs))
        jobs = [_job_of(spec, base, seed, overrides) for seed in spec.seeds]
    return [_run(job, (base / spec.job).parent, runs, new=new, progress=progress) for job in jobs]


def _job_of(spec: ThresholdSpec, base: Path, seed: int, overrides: Sequence[str]) -> AgentRLJob:
    job = read_job(base / spec.job, overrides)
    name_override = f"metadata.name={json.dumps(f'{job.metadata.name}-seed-{seed}')}"
    return read_job(base / spec.job, [*overrides, f"data.seed={seed}", name_override])


def _run(job: AgentRLJob, manifest_dir: Path, runs: Path, *, new: bool, progress: Console) -> RunDir:
    """The finished run of a job: an earlier one of the same manifest, or one that is started or resumed now."""
    earlier_runs = runs_of(runs, job.metadata.name)
    if earlier_runs and not new and earlier_runs[-1].succeeded() and earlier_runs[-1].job().spec == job.spec:
        progress.print(
            f"{earlier_runs[-1].id} has finished: judging it; --new runs it again", markup=False, soft_wrap=True
        )
        return earlier_runs[-1]
    folder, resumed = open_run(runs, job, new=new)
    options = RunOptions(
        manifest_dir=manifest_dir, cache_dir=cache_folder(runs), active_deadline=job.spec.active_deadline
    )
    code = run_job(job, folder, options, progress, resumed=resumed)
    if code:
        raise typer.Exit(code)
    return folder


def _warn_of_differences(job: AgentRLJob, run: RunDir) -> None:
    """Warns where a run was not made of the threshold's job: its number would mean something else."""
    differing = ", ".join(differing_fields(job, run.job()))
    if differing:
        errors.print(f"warning: {run.id} differs from the threshold's job in {differing}", markup=False, soft_wrap=True)


def _print(threshold: Threshold, verdict: ThresholdVerdict) -> None:
    spec = threshold.spec
    table = Table(title=f"{threshold.metadata.name}: {spec.metric}", title_justify="left")
    for name in ("seed", "run", "before", f"last {spec.plateau.evaluations} evaluations", "plateau", "fall", ""):
        table.add_column(name, justify="left" if name in {"run", ""} else "right")
    for seed in verdict.seeds:
        table.add_row(
            str(seed.seed),
            seed.run,
            "-" if seed.before is None else f"{seed.before:.3f}",
            " ".join(f"{value:.3f}" for value in seed.values),
            f"{seed.plateau:.3f}{_error(seed.standard_error)}",
            f"{seed.fall:+.3f}",
            "failed" if seed.problems else "ok",
        )
    console.print(table)
    lines = [
        *(f"{seed.run}: {spec.metric} {seed.rise}" for seed in verdict.seeds if seed.rise is not None),
        *(line for seed in verdict.seeds for line in _different(seed)),
        f"mean {verdict.mean:.3f}{_error(verdict.standard_error)}, threshold {spec.threshold:g}",
        f"published: {spec.published.value:g} ({spec.published.setting}); {spec.published.source}",
        f"template: {spec.template}",
        *(f"problem: {problem}" for problem in verdict.problems),
        "passed" if verdict.passed else "failed",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f" ±{standard_error:.3f}"


def _different(seed: SeedVerdict) -> Iterator[str]:
    pairs = {} if seed.rise is None else {"": seed.rise}
    return different_questions(pairs, f"{seed.run} before training", "its plateau")


def register(app: typer.Typer) -> None:
    app.command()(verify)
