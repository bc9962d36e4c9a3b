"""`kestrl sandbox`: checks the code sandbox of this node."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kestrl.errors import UserInputError

app = typer.Typer(no_args_is_help=True, help="Run code that a model wrote, isolated.")
AREAS = "resources, node, processes, files, kernel, network, identity, sessions, tenancy"


@app.callback()
def sandbox() -> None:
    """Run code that a model wrote, isolated."""


@app.command()
def check(
    backend: Annotated[str, typer.Option(help="Back-end to check: auto, zygote, bwrap or runsc.")] = "auto",
    area: Annotated[str, typer.Option(help=f"Only one area: {AREAS}.")] = "",
    verbose: Annotated[bool, typer.Option(help="List every program, also those that were held.")] = False,
    print_json: Annotated[bool, typer.Option("--json", help="Print every program as JSON.")] = False,
) -> None:
    """Run hostile programs in the sandbox of this node and report what they could do.

    Exit code 1: a program was not held. Exit code 2: no sandbox works here.
    """
    raise typer.Exit(asyncio.run(_check(backend, area, verbose=verbose, print_json=print_json)))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="[OPTIONS]",
)
def serve(context: typer.Context) -> None:
    """Serve the sandbox over HTTP with SandboxFusion's interface; `kestrl sandbox serve --help` lists the options."""
    from kestrl_sandbox.__main__ import main

    main(context.args, program="kestrl sandbox serve")


async def _check(backend: str, area: str, *, verbose: bool, print_json: bool) -> int:
    from kestrl_sandbox.backends import open_sandbox
    from kestrl_sandbox.checks.hostile import CHECKS
    from kestrl_sandbox.checks.neighbours import neighbours, orphans, sessions, shortage
    from kestrl_sandbox.checks.verdicts import CheckReport, examine
    from kestrl_sandbox.config import PoolConfig

    checks = [item for item in CHECKS if not area or item.area == area]
    if not checks and area not in {"sessions", "tenancy"}:
        raise UserInputError(f"--area: there is no area {area!r}; there are {AREAS}")
    console = Console(quiet=print_json)
    opened = await open_sandbox(PoolConfig(max_sandboxes=4, memory_mb=256, disk_mb=16, inodes=512), backend=backend)
    try:
        capabilities = opened.capabilities
        console.print(
            f"back-end {capabilities.backend}: isolates by {capabilities.isolation}, ready in "
            f"{capabilities.start_seconds:.2f} s"
        )
        for name, text in capabilities.mechanisms.items():
            console.print(f"  {name}: {text}", markup=False, highlight=False)
        report = CheckReport()
        async for verdict in examine(opened, checks):
            report.verdicts.append(verdict)
        if area in {"", "processes"}:
            report.verdicts.append(await orphans(opened))
        if area in {"", "node"}:
            report.verdicts.append(await shortage(opened))
        if area in {"", "sessions"}:
            report.verdicts += [verdict async for verdict in sessions(opened)]
        if area in {"", "tenancy"}:
            report.verdicts.append(await neighbours(opened))
    finally:
        await opened.close()
    if print_json:
        document = {"backend": capabilities.backend, "isolation": capabilities.isolation}
        programs = [
            {
                "area": verdict.check.area,
                "name": verdict.check.name,
                "held": verdict.held,
                "problem": verdict.problem,
                "detail": verdict.detail,
                "seconds": verdict.seconds,
            }
            for verdict in report.verdicts
        ]
        typer.echo(json.dumps({**document, "programs": programs}, indent=2))
    else:
        _print(console, report, verbose=verbose)
    return 1 if report.breaches else 0


def _print(console: Console, report: object, *, verbose: bool) -> None:
    from kestrl_sandbox.checks.verdicts import CheckReport

    assert isinstance(report, CheckReport)
    table = Table("area", "held", "of", "seconds", box=None)
    for area in dict.fromkeys(verdict.check.area for verdict in report.verdicts):
        those = [verdict for verdict in report.verdicts if verdict.check.area == area]
        passed = sum(verdict.held for verdict in those)
        table.add_row(area, str(passed), str(len(those)), f"{sum(verdict.seconds for verdict in those):.1f}")
    console.print(table)
    for verdict in report.verdicts:
        if verbose or not verdict.held:
            mark = "held" if verdict.held else "NOT HELD"
            line = f"{mark}: {verdict.check.area}: {verdict.check.name}: {verdict.problem or verdict.detail}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
