"""The command `kestrl env check`: plays a job's environment, tools and rewards without a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from kestrl._app.cli.options import AsJson, Manifest, Overrides
from kestrl._app.plays.playing import plays_of
from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.spec import read_job
from kestrl.errors import SeveralProblems
from kestrl.terminal import safe_line

console = Console()
errors = Console(stderr=True)
PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
environments = typer.Typer(
    no_args_is_help=True, help="Check a job's environment, tools and rewards without a model, before training."
)


@environments.callback()
def _environments() -> None:
    """Makes the check a sub-command."""


@environments.command("check")
def check_environment(
    manifest: Manifest,
    set_: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows that are played, the first ones.")] = 8,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            help="Report that counts too, several times: the folder of vf-validate, which is not run then, or the file "
            "of openenv validate --output."
        ),
    ] = None,
    print_json: AsJson = False,
) -> None:
    """Play rows without a model: the solution earns the most, doing nothing the least, and the same play the same.

    Exit code 2 if there is a problem.
    """
    job = read_job(manifest, set_ or ())
    with TemporaryDirectory() as cache:
        verdict = plays_of(job, base=manifest.resolve().parent, cache_dir=Path(cache), rows=rows, reports=report or ())
    if print_json:
        typer.echo(json.dumps({"valid": not verdict.problems, **asdict(verdict)}, indent=2))
        raise typer.Exit(EXIT_INPUT if verdict.problems else 0)
    for warning in verdict.warnings:
        errors.print(f"warning: {safe_line(warning)}", **PLAIN)
    console.print(f"{manifest}: {verdict.summary or 'nothing was played'}", **PLAIN)
    if verdict.problems:
        raise SeveralProblems(verdict.problems)


def register(app: typer.Typer) -> None:
    app.add_typer(environments, name="env")
