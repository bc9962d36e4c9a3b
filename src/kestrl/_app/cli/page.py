"""The command `kestrl ui`: the page of runs, steps and episodes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from kestrl._app.cli.options import DEFAULT_RUNS, Runs
from kestrl._app.episodes.places import find_place
from kestrl._app.page.addressed_runs import library_at
from kestrl._app.page.library import Library, RunsFolder, SingleRun
from kestrl.errors import UserInputError


def ui(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Folder of runs, run id, folder of an evaluation, or address of a run or of runs, such as "
            "s3://bucket/runs (default: all runs of --runs).",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 is a free one.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Without labels.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write the pages into this folder and end.", show_default=False)
    ] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Show runs, steps and episodes in a browser: why an episode failed, beside one that did not."""
    show(target, runs, port=port, read_only=read_only, export=export)


def show(target: str | None, runs: Path, *, port: int, read_only: bool, export: Path | None) -> None:
    """Serves the page until it is interrupted, or writes it into a folder.

    Raises:
        UserInputError: There is no such run, or a package is missing.
    """
    library, labels = _library(runs, target)
    try:
        from kestrl._app.page.export import export_pages
        from kestrl._app.page.server import LOOPBACK, listener, page_app, serve
    except ModuleNotFoundError as error:
        raise UserInputError(f"the page needs the package {error.name}: pip install 'kestrl[ui]'") from error
    if export is not None:
        typer.echo(f"{export_pages(library, export)} pages in {export}; open {export / 'index.html'}")
        return
    token = secrets.token_urlsafe(24)
    with listener(port) as listening:
        bound = listening.getsockname()[1]
        typer.echo(f"http://{LOOPBACK}:{bound}/?token={token}")
        typer.echo("The address lets its reader in; links that you copy from the browser do not. Ctrl-C ends it.")
        serve(page_app(library, token, labels=labels and not read_only), listening)


def _library(runs: Path, target: str | None) -> tuple[Library, bool]:
    """The runs to show, and whether their folder may be written.

    Raises:
        UserInputError: There is no such folder or run.
    """
    folder = runs if target is None else Path(target)
    if target is None and not folder.is_dir():
        raise UserInputError(f"there is no folder {folder}; name a folder of runs, a run or an address")
    if target is None or ("://" not in target and next(folder.glob("*/job.json"), None) is not None):
        return RunsFolder(folder.resolve()), os.access(folder, os.W_OK)
    if "://" in target and (addressed := library_at(target)) is not None:
        return addressed, True
    place = find_place(runs, target)
    name = place.run.id if place.run is not None else target.rstrip("/").rpartition("/")[2] or "run"
    return SingleRun(name, place), place.run is None or os.access(place.run.path, os.W_OK)


def register(app: typer.Typer) -> None:
    app.command()(ui)
