"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Manifest = Annotated[Path, typer.Argument(help="The AgentRLJob manifest.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a manifest field, such as algorithm.groupSize=4; repeatable.", metavar="PATH=VALUE"
    ),
]
Runs = Annotated[
    Path, typer.Option("--runs", envvar="KESTRL_RUNS", resolve_path=True, help="Folder that contains the runs.")
]
EnginePython = Annotated[
    Path | None,
    typer.Option(help="Interpreter that has the inference engine; as inference.python.", show_default=False),
]
RunId = Annotated[str | None, typer.Argument(help="Run id (default: the latest run).", show_default=False)]
Details = Annotated[bool, typer.Option("--details", help="Also print every question and what each candidate did.")]
Sequential = Annotated[bool, typer.Option("--sequential", help="Run one episode at a time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Debug level in the logs of all components.")]
DEFAULT_RUNS = Path("runs")


def with_engine(overrides: list[str] | None, python: Path | None) -> list[str]:
    """Overrides with the engine's interpreter, which is relative to the working directory."""
    engine_overrides = (
        [] if python is None else [f"inference.python={json.dumps(str(Path.cwd() / python.expanduser()))}"]
    )
    return [*(overrides or ()), *engine_overrides]
