"""The commands of `kestrl -n NAMESPACE` and `kubectl kestrl`: they ask the API server as whom kubectl is logged in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrl._app.cluster.kubectl import Jobs
from kestrl._app.cluster.printing import run_address, status_lines, suspension_line
from kestrl.terminal import safe

if TYPE_CHECKING:  # the commands import what they use
    from kestrl._app.cli.adapters import TrainedRun

JobName = Annotated[str, typer.Argument(help="Name of the AgentRLJob.", show_default=False)]
cluster = typer.Typer()


def _jobs(context: typer.Context) -> Jobs:
    options = context.find_root().params
    return Jobs(namespace=options["_namespace"], context=options["_context"])


@cluster.command("status")
def status(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of the AgentRLJob (default: list all).")] = None,
) -> None:
    """Show the state of a job: progress, conditions, engines, failures and the last crash."""
    jobs = _jobs(context)
    lines = (safe(line) for line in jobs.table().splitlines()) if name is None else status_lines(jobs.get(name))
    for line in lines:
        typer.echo(line)


@cluster.command("logs")
def logs(
    context: typer.Context,
    name: JobName,
    component: Annotated[
        str | None, typer.Option("--component", "-c", help="Role such as learner or inference (default: all).")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to print from the end of each log.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs.")] = False,
) -> None:
    """Print the logs of a job's pods."""
    jobs = _jobs(context)
    jobs.get(name)  # an unknown name is an error, and not a job without logs
    for line in jobs.log_lines(name, component, lines=lines, follow=follow):
        typer.echo(safe(line))


@cluster.command("episodes")
def episodes(
    context: typer.Context,
    name: JobName,
    step: Annotated[int | None, typer.Option(help="Only this step, as the live view numbers it.")] = None,
    failed: Annotated[
        bool | None, typer.Option("--failed/--not-failed", help="Only episodes that failed, or only others.")
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the stored episodes of a job, with the storage's credentials of your environment."""
    from kestrl._app.cli.episodes import list_episodes

    list_episodes(run_address(_jobs(context).get(name)), step=step, failed=failed, print_json=print_json)


@cluster.command("ui")
def ui(
    context: typer.Context,
    name: JobName,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 is a free one.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Without labels.")] = False,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="Write the pages into this folder and end.", show_default=False)
    ] = None,
) -> None:
    """Show the steps and stored episodes of a job in a browser, with the storage's credentials of your environment."""
    from kestrl._app.cli.options import DEFAULT_RUNS
    from kestrl._app.cli.page import show

    show(run_address(_jobs(context).get(name)), DEFAULT_RUNS, port=port, read_only=read_only, export=export_to)


@cluster.command("export")
def export(
    context: typer.Context,
    name: JobName,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to create; it must not exist yet.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the adapter (default: the newest).")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base model.")] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="hf://ORG/NAME", help="Also upload it to the Hugging Face Hub, with a card."),
    ] = None,
) -> None:
    """Export an adapter of a job with every digest verified, with the storage's credentials of your environment."""
    from kestrl._app.cli.adapters import export_run

    export_run(lambda: _trained(_jobs(context).get(name)), out, step=step, merge=merge, push=push)


def _trained(job: Mapping[str, Any]) -> TrainedRun:
    """The run of a job, whose base model is looked for where this program runs."""
    from kestrl._app.cli.adapters import TrainedRun
    from kestrl.data.locate import locate_model
    from kestrl.storage import open_store

    address, base = run_address(job), job["spec"]["model"]["base"]
    return TrainedRun(
        address.rpartition("/")[2],
        open_store(address),
        lambda: locate_model(base, base=Path.cwd()),
        base=base,
        data=[job["spec"]["data"]["train"]["uri"]],
    )


@cluster.command("suspend")
def suspend(context: typer.Context, name: JobName) -> None:
    """Suspend a job: it finishes its step, writes a checkpoint and gives its devices back."""
    typer.echo(suspension_line(_jobs(context).suspend(name, suspended=True)))


@cluster.command("resume")
def resume(context: typer.Context, name: JobName) -> None:
    """Resume a suspended job from its checkpoint."""
    typer.echo(suspension_line(_jobs(context).suspend(name, suspended=False)))
