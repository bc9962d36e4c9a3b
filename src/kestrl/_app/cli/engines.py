"""Commands for engines in environments of their own: install, list, check, remove."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kestrl._app.engines.builds import DEVICES, wanted_engine
from kestrl._app.engines.checking import check_installed
from kestrl._app.engines.installing import find_installed, install, remove, size
from kestrl._app.engines.store import VARIABLE, Installed, engines_folder, installed_engines
from kestrl.data.locate import locate_model
from kestrl.terminal import safe_line

console = Console()
errors = Console(stderr=True)
PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
HEADINGS = ("engine", "version", "device", "verified", "size", "path")
engines = typer.Typer(no_args_is_help=True, help="Install inference engines, each in an environment of its own.")

Engine = Annotated[str, typer.Argument(metavar="ENGINE", help="Such as vllm or vllm==0.32.0.", show_default=False)]
Device = Annotated[str, typer.Option(help=f"Device that the build is for: {' or '.join(DEVICES)}.")]
Folder = Annotated[
    Path | None,
    typer.Option("--engines", help=f"Folder of installed engines, as ${VARIABLE}.", show_default=False),
]


def _folder(folder: Path | None) -> Path:
    return engines_folder() if folder is None else engines_folder({VARIABLE: str(folder)})


def _say(line: str) -> None:
    errors.print(safe_line(line), **PLAIN)


@engines.command("install")
def install_engine(engine: Engine, device: Device = DEVICES[0], folder: Folder = None) -> None:
    """Install an engine, from the lock that ships for it or by resolving its requirements."""
    request = wanted_engine(engine, device)
    installed = install(_folder(folder), request, _say)
    console.print(f"{installed} is in {installed.path}", **PLAIN)
    if not installed.verified:
        _say(f"warning: it was not tried with kestrl; run: {_command('check', installed, folder)}")


@engines.command("list")
def list_engines(
    folder: Folder = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the installed engines."""
    place = _folder(folder)
    rows = [_row(engine) for engine in installed_engines(place)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        console.print(f"no engine is installed in {place}; install one with: kestrl engine install vllm", **PLAIN)
        return
    widths = (8, 16, 8, 10, 10)
    for cells in (HEADINGS, *map(_cells, rows)):
        line = "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False))
        console.print(f"{line}{safe_line(cells[-1])}", **PLAIN)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    verified = "yes" if row["verified"] else "no"
    return row["engine"], row["version"], row["device"], verified, f"{row['bytes'] / 2**30:.1f} GiB", row["path"]


def _row(engine: Installed) -> dict[str, Any]:
    record = engine.record
    return {
        "engine": record.engine,
        "version": record.version,
        "device": record.device,
        "verified": engine.verified,
        "bytes": size(engine.path),
        "path": str(engine.path),
    }


@engines.command("check")
def check_engine(
    engine: Engine,
    device: Device = DEVICES[0],
    model: Annotated[str, typer.Option(help="Model to start it with.")] = "demo://tiny",
    folder: Folder = None,
) -> None:
    """Start an installed engine and run the conformance suite. Exit code 1 if it does not conform."""
    installed_engine = find_installed(_folder(folder), wanted_engine(engine, device))
    located = locate_model(model, base=Path.cwd(), field="--model")
    work = Path(tempfile.mkdtemp(prefix="kestrl-engine-check-"))
    _say(f"checking {installed_engine}; its log is {work / 'engine.log'}")
    check_installed(installed_engine, located, work)
    console.print(f"{installed_engine} conforms", **PLAIN)


@engines.command("remove")
def remove_engine(engine: Engine, device: Device = DEVICES[0], folder: Folder = None) -> None:
    """Remove an installed engine that nothing uses."""
    place = _folder(folder)
    installed_engine = find_installed(place, wanted_engine(engine, device))
    remove(place, installed_engine)
    console.print(f"{installed_engine} is removed", **PLAIN)


def _command(name: str, engine: Installed, folder: Path | None) -> str:
    return f"kestrl engine {name} {engine}" + ("" if folder is None else f" --engines {shlex.quote(str(folder))}")


def register(app: typer.Typer) -> None:
    app.add_typer(engines, name="engine")
