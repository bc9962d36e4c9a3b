"""The `kestrl` program: its commands, those of installed applications, and the conversion of errors into exit codes."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kestrl._app.cli.commands import Commands
from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl.errors import KestrlError, UserInputError, place_error
from kestrl.terminal import safe

EXIT_BROKEN_PIPE = 128 + 13
"""What a shell shows for a program that SIGPIPE ended."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train tool-using language-model agents with reinforcement learning.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kestrl {version('kestrl')}")
        raise typer.Exit


@app.callback()
def kestrl(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    _namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace on a cluster: status, logs, episodes, suspend and resume are then of its jobs, by kubectl.",
        ),
    ] = None,
    _context: Annotated[
        str | None, typer.Option("--context", help="Context of kubectl (default: its current one).")
    ] = None,
) -> None:
    pass


def main(*, on_cluster: bool = False) -> None:
    """Runs a command. Exit code 2 means that the input has to be fixed, 1 that the command failed.

    Args:
        on_cluster: Whether commands are for jobs of a cluster also without a namespace, as of `kubectl kestrl`.
    """
    console = Console(stderr=True)
    try:
        app(obj=on_cluster)
        sys.stdout.flush()
    except UserInputError as error:
        _end(console, str(error), EXIT_INPUT)
    except KestrlError as error:
        _end(console, str(error.failure()), EXIT_FAILED)
    except BrokenPipeError:
        _reader_left()
    except OSError as error:
        unusable = place_error(error, str(error.filename or "a file"))
        if unusable is None:
            raise
        _end(console, str(unusable), EXIT_INPUT)


def _reader_left() -> NoReturn:
    """Ends without a message when the reader of the output has closed it, as in `kestrl episodes list | head`."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # what is still buffered is flushed at exit
    sys.exit(EXIT_BROKEN_PIPE)


def _end(console: Console, message: str, code: int) -> NoReturn:
    console.print(safe(f"error: {message}"), style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
