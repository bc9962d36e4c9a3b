"""The commands `kestrl data ...`: data sets of the examples as files that jobs read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from kestrl._app.interpreters.listing import listed_rows
from kestrl._app.local.site import interpreter_of
from kestrl._app.tasks import arithmetic as arithmetic_data
from kestrl._app.tasks.gsm8k import MathTool, read_gsm8k
from kestrl._app.tasks.retool import read_retool
from kestrl._app.tasks.word_problems import Form, generated
from kestrl._app.tasks.writing import write_rows
from kestrl._shared.spec.environments import Environment
from kestrl.errors import UserInputError
from kestrl.terminal import safe_line

data = typer.Typer(no_args_is_help=True, help="Write data sets as JSONL or Parquet.")
Out = Annotated[Path, typer.Option("--out", help="File to write, .jsonl or .parquet.", show_default=False)]
Split = Annotated[str, typer.Option(help="Name of the split.")]
Packages = Annotated[
    list[str] | None,
    typer.Option(help="Requirement to install, several times: those of the manifest's python.requirements."),
]
PythonOption = Annotated[
    str | None,
    typer.Option(help="Version of Python: the manifest's python.version.", show_default="that of KestRL"),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        help="Name of a variable of this shell that the code of the tasks gets, several times. Beside these it has "
        "PATH, HOME and the locale.",
        show_default=False,
    ),
]


@data.callback()
def _data() -> None:
    """Makes every data set a sub-command."""


@data.command()
def gsm8k(
    source: Annotated[
        Path,
        typer.Option(help="GSM8K's own file: OpenAI's .jsonl, or the .parquet of Hugging Face.", show_default=False),
    ],
    out: Out,
    split: Split = "train",
    tool: Annotated[MathTool, typer.Option(help="The tool that the rows offer.")] = MathTool.CALCULATOR,
    skip: Annotated[int, typer.Option(min=0, help="Rows to leave out at the beginning.")] = 0,
    size: Annotated[int | None, typer.Option(min=1, help="Number of rows (default: all that follow).")] = None,
) -> None:
    """Write GSM8K as rows in verl's form."""
    rows = read_gsm8k(source, split=split, tool=tool, skip=skip, size=size)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


@data.command()
def retool(
    source: Annotated[
        Path,
        typer.Option(
            help="ReTool's SFT rows, verl's rows of questions, or problems with answers: .jsonl or .parquet.",
            show_default=False,
        ),
    ],
    out: Out,
    name: Annotated[
        str | None, typer.Option(help="data_source of problems with answers (default: the name of the file).")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Converted rows to leave out at the beginning.")] = 0,
    size: Annotated[int | None, typer.Option(min=1, help="Number of rows (default: all that follow).")] = None,
) -> None:
    """Convert ReTool's data: transcripts for kestrl sft, or questions for a job."""
    conversion = read_retool(source, name=name, skip=skip, size=size)
    write_rows(out, conversion.rows)
    typer.echo(f"{out}: {len(conversion.rows)} {conversion.what}")
    for line in conversion.lines(source):
        typer.echo(safe_line(line))


@data.command("word-problems")
def word_problems(
    out: Out,
    size: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 42,
    split: Annotated[str, typer.Option(help="train or validation, which have different people.")] = "train",
    form: Annotated[Form, typer.Option(help="Scenarios, GSM8K's own form, or conversations for SFT.")] = Form.ROWS,
    one_step: Annotated[bool, typer.Option("--one-step", help="Only problems that one operation solves.")] = False,
    mistakes: Annotated[float, typer.Option(min=0, max=1, help="Share of transcripts with a wrong calculation.")] = 0.0,
) -> None:
    """Generate word problems in the manner of GSM8K."""
    rows = generated(form, split=split, seed=seed, size=size, one_step=one_step, mistakes=mistakes)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


@data.command()
def arithmetic(
    out: Out,
    size: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 42,
    split: Annotated[str, typer.Option(help="train or validation, which share no problem.")] = "train",
    transcripts: Annotated[
        bool, typer.Option("--transcripts", help="Conversations in ReTool's form, for SFT, instead of scenarios.")
    ] = False,
    mistakes: Annotated[float, typer.Option(min=0, max=1, help="Share of transcripts with a wrong operator.")] = 0.0,
) -> None:
    """Generate arithmetic that is solved by running code: the data of ReTool's two stages, scaled down."""
    if mistakes and not transcripts:
        raise UserInputError("--mistakes: is the share of mistaken transcripts; add --transcripts")
    if transcripts:
        rows = arithmetic_data.transcripts(split, seed=seed, size=size, mistakes=mistakes)
    else:
        rows = arithmetic_data.rows(split, seed=seed, size=size)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


@data.command("reasoning-gym")
def reasoning_gym(
    generator: Annotated[str, typer.Argument(help="Name of the generator, such as chain_sum.", show_default=False)],
    out: Out,
    size: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 1000,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seed of the tasks. Task 1 of a seed is task 0 of the next one: validation data have a seed that is "
            "farther away than --size.",
        ),
    ] = 42,
    config: Annotated[
        str, typer.Option(help="Settings of the generator as JSON: those of the manifest's reasoningGym.config.")
    ] = "{}",
    transcripts: Annotated[
        bool,
        typer.Option("--transcripts", help="Questions with the generator's answers, for kestrl sft, instead of tasks."),
    ] = False,
    package: Packages = None,
    python: PythonOption = None,
    env: EnvOption = None,
) -> None:
    """List tasks of a generator of reasoning-gym as rows, each with its digest."""
    gym = {"generator": generator, "config": _settings(config)}
    environment = _environment("reasoningGym", gym, package, python)
    assert environment.reasoning_gym is not None
    interpreter = interpreter_of(environment, field="--package")
    settings = environment.reasoning_gym.config
    listing = {"generator": generator, "settings": settings, "seed": seed, "size": size, "transcripts": transcripts}
    rows = listed_rows(str(interpreter), listing, field=f"GENERATOR {generator}", variables=_variables(env))
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


@data.command("verifiers")
def verifiers(
    taskset: Annotated[
        str,
        typer.Argument(help="Name of the task set: a package in this folder or of --package.", show_default=False),
    ],
    out: Out,
    size: Annotated[int | None, typer.Option(min=1, help="Number of tasks, the first ones. Default: all.")] = None,
    config: Annotated[
        str, typer.Option(help="Settings of the task set as JSON: those of the manifest's verifiers.config.taskset.")
    ] = "{}",
    package: Packages = None,
    python: PythonOption = None,
    env: EnvOption = None,
) -> None:
    """List tasks of a task set of verifiers as rows, each with its digest."""
    settings = {"taskset": _settings(config)}
    environment = _environment("verifiers", {"taskset": taskset, "config": settings}, package, python)
    interpreter = interpreter_of(environment, field="--package")
    listing = {"taskset": taskset, "settings": settings["taskset"], "size": size}
    variables = _variables(env)
    rows = listed_rows(
        str(interpreter), listing, field=f"TASKSET {taskset}", python_path=(Path.cwd(),), variables=variables
    )
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


@data.command("openenv")
def openenv(
    server: Annotated[
        str,
        typer.Argument(
            help="URL of a running server, or import path of its application, such as guess_env:app.",
            show_default=False,
        ),
    ],
    out: Out,
    split: Annotated[str | None, typer.Option(help="Name of the split. Default: train, or the only one.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Number of tasks, the first ones. Default: all.")] = None,
    package: Packages = None,
    python: PythonOption = None,
    env: EnvOption = None,
) -> None:
    """List tasks that a server of OpenEnv offers as rows, each with its digest."""
    running = server.startswith(("http://", "https://"))
    environment = _environment("openenv", {"url" if running else "app": server}, package, python)
    assert environment.openenv is not None
    interpreter = sys.executable if running else interpreter_of(environment, field="--package")
    listing = {"openenv": environment.openenv.model_dump(), "split": split, "size": size}
    variables = _variables(env)
    rows = listed_rows(
        str(interpreter), listing, field=f"SERVER {server}", python_path=(Path.cwd(),), variables=variables
    )
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows")


def _settings(config: str) -> Any:
    try:
        return json.loads(config)
    except ValueError as error:
        raise UserInputError(f"--config: is no JSON: {error}") from error


def _variables(names: list[str] | None) -> dict[str, str]:
    """Variables of this process by name.

    Raises:
        UserInputError: One is not set.
    """
    missing_names = [name for name in names or () if name not in os.environ]
    if missing_names:
        raise UserInputError(f"--env {missing_names[0]}: the variable is not set")
    return {name: os.environ[name] for name in names or ()}


def _environment(kind: str, fields: dict[str, Any], packages: list[str] | None, version: str | None) -> Environment:
    """An environment as a manifest has it.

    Raises:
        UserInputError: An option is invalid.
    """
    try:
        python = {"requirements": packages or [], "version": version}
        return Environment.model_validate({kind: fields, "python": python})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserInputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def register(app: typer.Typer) -> None:
    app.add_typer(data, name="data")
