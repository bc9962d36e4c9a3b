"""The command `kestrl new`, which writes a starter."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kestrl._app.starters.writing import STARTERS, write_starter
from kestrl.terminal import safe_line


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.", show_default=False)],
    template: Annotated[str, typer.Option(help=f"What to begin with: {', '.join(STARTERS)}.")] = STARTERS[0],
) -> None:
    """Write a job of your own to begin with: manifest, code, ten rows, tests and a README that says what to type."""
    write_starter(template, folder)
    typer.echo(safe_line(f"{folder} is written; next: cd {shlex.quote(str(folder))} && kestrl validate job.yaml"))


def register(app: typer.Typer) -> None:
    app.command()(new)
