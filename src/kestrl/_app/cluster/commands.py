"""The commands of `kestrl -n NAMESPACE` and `kubectl kestrl`: they ask the API server as whom kubectl is logged in."""

from __future__ import annotations

from typing import Annotated

import typer

from kestrl._app.cluster.kubectl import Jobs
from kestrl._app.cluster.printing import run_address, status_lines, suspension_line
from kestrl.terminal import safe

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


@cluster.command("suspend")
def suspend(context: typer.Context, name: JobName) -> None:
    """Suspend a job: it finishes its step, writes a checkpoint and gives its devices back."""
    typer.echo(suspension_line(_jobs(context).suspend(name, suspended=True)))


@cluster.command("resume")
def resume(context: typer.Context, name: JobName) -> None:
    """Resume a suspended job from its checkpoint."""
    typer.echo(suspension_line(_jobs(context).suspend(name, suspended=False)))
