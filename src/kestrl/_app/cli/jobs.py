"""Commands about a manifest: run, validate, plan, doctor, schema, version."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kestrl._app.cli.options import DEFAULT_RUNS, AsJson, EnginePython, Manifest, Overrides, Runs, Verbose, with_engine
from kestrl._shared.conventions import EXIT_INPUT, LEVEL_VARIABLE
from kestrl._shared.spec import job_schema, read_job
from kestrl.errors import UserInputError, problems_of
from kestrl.terminal import safe_line

if TYPE_CHECKING:
    from kestrl._app.local.runner import RunFollower
    from kestrl._shared.credentials import Secret
    from kestrl._shared.spec import AgentRLJob

console = Console()
errors = Console(stderr=True)
PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}


def run(
    manifest: Manifest,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
    new: Annotated[bool, typer.Option("--new", help="Start a new run instead of resuming an unfinished one.")] = False,
    base_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="First of the consecutive ports to use (default: free ports).")
    ] = None,
    engine_python: EnginePython = None,
    verbose: Verbose = False,
) -> None:
    """Train on this machine: start every component of the job and wait for the result. Resumes an unfinished run."""
    from kestrl._app.engines import interpreter
    from kestrl._app.episodes.newest import newest_verdict
    from kestrl._app.interpreters.places import in_use
    from kestrl._app.local.rundir import cache_folder, open_run
    from kestrl._app.local.runner import RunOptions, run_job

    if verbose:
        os.environ[LEVEL_VARIABLE] = "DEBUG"
    job = read_job(manifest, with_engine(set_, engine_python))
    follower = _follower(job, manifest.resolve().parent)
    folder, resumed = open_run(runs, job, new=new)
    options = RunOptions(
        manifest_dir=manifest.resolve().parent,
        cache_dir=cache_folder(runs),
        base_port=base_port,
        active_deadline=job.spec.active_deadline,
        verdict=newest_verdict,
        follower=follower,
    )
    python = interpreter.engine_python(job.spec.inference, options.manifest_dir)
    with in_use(None if python is None else Path(python)):
        code = run_job(job, folder, options, console, resumed=resumed)
    raise typer.Exit(code)


def _follower(job: AgentRLJob, base: Path) -> RunFollower | None:
    """Sends the run to the MLflow server that the job names.

    Raises:
        UserInputError: A package is missing.
    """
    if job.spec.telemetry.mlflow is None:
        return None
    from kestrl._app.local.secrets import Secrets
    from kestrl._app.push.beside import MLflowFollower

    return MLflowFollower(job.spec.telemetry.mlflow, Secrets(job, base).mlflow, base)


def validate(
    manifest: Manifest,
    set_: Overrides = None,
    data: Annotated[bool, typer.Option("--data/--no-data", help="Also validate every row of the data sets.")] = True,
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Also load the tokenizer and the chat template of the model.")
    ] = True,
    runs: Runs = DEFAULT_RUNS,
    print_json: AsJson = False,
    engine_python: EnginePython = None,
) -> None:
    """Check a manifest, the code and files that it references, and its data. Exit code 2 if there is a problem.

    SFTJobs and Thresholds are checked too, with the jobs that a Threshold names.
    """
    from kestrl._app.checks.manifests import add_devices, check_manifest, read_manifest, refused

    try:
        parsed_manifest = read_manifest(manifest, with_engine(set_, engine_python))
        findings = check_manifest(parsed_manifest, data=data, model=model)
        add_devices(findings, parsed_manifest, runs)
    except UserInputError as error:
        if not print_json:
            raise
        findings = refused(error)
    if print_json:
        typer.echo(json.dumps(findings.as_json(), indent=2))
        raise typer.Exit(EXIT_INPUT if findings.problems else 0)
    for warning in findings.warnings:
        errors.print(f"warning: {safe_line(warning)}", **PLAIN)
    findings.raise_problems()
    console.print(f"{manifest}: {', '.join(filter(None, ['valid', findings.summary]))}", soft_wrap=True, markup=False)
    for line in findings.devices:
        console.print(safe_line(line), **PLAIN)


def plan(
    manifest: Manifest,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
    as_json: AsJson = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Print the learner's peak memory instead; also of an SFTJob. Needs the learner."),
    ] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="With --memory: exit code 2 if a device of this size is too small."),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT+COMPLETION", help="With --memory: tokens of a row (default: the longest the job allows)."
        ),
    ] = None,
) -> None:
    """Print the components that a job consists of. Starts nothing and writes nothing."""
    from tempfile import TemporaryDirectory

    from kestrl._app.cli.memory import print_memory
    from kestrl._app.local.check import fitted_job
    from kestrl._app.local.rundir import RunDir, cache_folder
    from kestrl._app.local.site import local_devices, relocated, reserved_ports, site_of
    from kestrl._shared.plan.agents import outside_line
    from kestrl._shared.plan.planning import plan as make_plan

    if memory:
        print_memory(
            manifest, tuple(set_ or ()), row=row, device_memory=device_memory, as_json=as_json, console=console
        )
        return
    if device_memory is not None or row is not None:
        raise UserInputError("--device-memory and --row belong to --memory; give it too")
    base = manifest.resolve().parent
    job = fitted_job(read_job(manifest, set_ or ()), base)
    folder = RunDir(runs.resolve() / f"{job.metadata.name}-plan")
    try:
        devices = local_devices(job)
    except UserInputError as error:  # a manifest for other machines is planned, too
        devices = None
        errors.print(f"warning: no devices are assigned: {safe_line(str(error))}", **PLAIN)
    with TemporaryDirectory() as scratch, reserved_ports(job, None) as reserved:  # generated data is discarded
        generated = Path(scratch).resolve()
        site = site_of(job, folder, base, ports=reserved, cache_dir=generated, devices=devices, installs=False)
    site = relocated(site, generated, cache_folder(runs))
    components = make_plan(job, site)
    if as_json:
        document = [
            {
                "name": item.name,
                "role": item.role,
                "module": item.module,
                "args": item.args,
                "env": dict(item.env),
                "secrets": item.secrets,
                "ports": dict(item.ports),
                "device": {
                    "profile": item.device.profile,
                    "count": item.device.count,
                    "indices": item.device.indices,
                },
                "settings": None if item.settings is None else item.settings.model_dump(mode="json"),
            }
            for item in components
        ]
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table(Column("component", no_wrap=True), Column("module", no_wrap=True), "device", "ports")
    holders: dict[tuple[Secret, ...], list[str]] = {}
    for item in components:
        ports = ", ".join(f"{name} {port}" for name, port in item.ports.items())
        device = f"{item.device.profile} x{item.device.count}" if item.device.count else "-"
        device += f": {', '.join(item.device.indices)}" if item.device.indices else ""
        table.add_row(item.name, item.module, device, ports)
        holders.setdefault(tuple(item.secrets), []).append(item.name)
    console.print(table)
    for secrets, names in holders.items():  # in a column, their names would be cut
        console.print(f"credentials of {', '.join(names)}: {', '.join(secrets) or 'none'}", **PLAIN)
    if line := outside_line(job.spec.agent):
        console.print(safe_line(f"agent: {line}"), **PLAIN)
    for note in () if site.devices is None else site.devices.notes:
        console.print(note, **PLAIN)


def doctor(
    manifest: Annotated[Path | None, typer.Argument(help="Also check what this job needs.")] = None,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
    print_json: AsJson = False,
    engine_python: EnginePython = None,
) -> None:
    """Check whether this machine can run a job and report what is missing. Exit code 2 if anything is."""
    from kestrl._app.checks.doctor import Finding, examine
    from kestrl._app.checks.manifests import read_manifest
    from kestrl._app.error_text import error_lines

    if manifest is None and engine_python is not None:
        raise UserInputError("--engine-python belongs to a manifest; give one, too")
    try:
        parsed_manifest = None if manifest is None else read_manifest(manifest, with_engine(set_, engine_python))
    except UserInputError as error:
        if not print_json:
            raise
        unread = Finding(name="job", status="unusable", fix="\n".join(problems_of(error)))
        typer.echo(json.dumps([asdict(unread)], indent=2))
        raise typer.Exit(EXIT_INPUT) from error
    any_missing = False
    if print_json:
        findings = list(examine(parsed_manifest, runs=runs))
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        raise typer.Exit(EXIT_INPUT if any(finding.fix for finding in findings) else 0)
    for finding in examine(parsed_manifest, runs=runs):
        any_missing |= bool(finding.fix)
        console.print(f"{'MISSING' if finding.fix else 'ok':<8}{finding.name:<12} {finding.status}", **PLAIN)
        if finding.fix:
            for line in error_lines(UserInputError(finding.fix)):
                console.print(f"{'':<8}{'':<12} {line}", **PLAIN)
    raise typer.Exit(EXIT_INPUT if any_missing else 0)


def schema() -> None:
    """Print the JSON Schema of a manifest."""
    typer.echo(json.dumps(job_schema(), indent=2))


def show_version() -> None:
    """Print the version."""
    typer.echo(f"kestrl {version('kestrl')}")


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(validate)
    app.command()(plan)
    app.command()(doctor)
    app.command()(schema)
    app.command("version")(show_version)
