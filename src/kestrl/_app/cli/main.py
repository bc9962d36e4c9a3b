"""The `kestrl` program: its commands, those of installed applications, and the conversion of errors into exit codes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from kestrl._app.cli.commands import Commands
from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl.errors import KestrlError, UserInputError, described, place_error, text_of

if TYPE_CHECKING:  # typer has click within itself and offers this type nowhere else
    from typer._click.core import Context

EXIT_BROKEN_PIPE = 128 + 13
"""What a shell shows for a program that SIGPIPE ended."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train tool-using language-model agents with reinforcement learning.",
)


def _print_version(show_version: bool) -> None:
    if show_version:
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
        status = app(obj=on_cluster, standalone_mode=False, prog_name="kubectl kestrl" if on_cluster else "kestrl")
        sys.stdout.flush()
    except TyperException as error:
        _refuse_usage(console, error)
    except typer.Abort as error:
        _end(console, error, EXIT_FAILED, "aborted")
    except UserInputError as error:
        _end(console, error, EXIT_INPUT)
    except KestrlError as error:
        _end(console, error, EXIT_FAILED, str(error.failure()))
    except BrokenPipeError:
        _reader_left()
    except OSError as error:
        unusable = place_error(error, str(error.filename or "a file"))
        if unusable is None:
            _end(console, error, EXIT_FAILED, text_of(error), keep=True)
        _end(console, unusable, EXIT_INPUT)
    except Exception as error:  # noqa: BLE001 - the rim of the program: it is printed, and kept with its traceback
        text = f"{described(error)}\nthis is a fault of KestRL or of a package: report it with the whole text"
        _end(console, error, EXIT_FAILED, text, keep=True)
    sys.exit(status if isinstance(status, int) else 0)  # an int is that of typer.Exit


def _refuse_usage(console: Console, error: TyperException) -> NoReturn:
    """Ends with what is wrong about the command line, and the command that explains it; with help, where a group of
    commands was named alone.
    """
    context: Context | None = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
        sys.exit(error.exit_code)
    text = " ".join(error.format_message().split())
    text = text if context is None else f"{text}\n{context.command_path} -h explains it"
    _end(console, error, error.exit_code, text)


def _reader_left() -> NoReturn:
    """Ends without a message when the reader of the output has closed it, as in `kestrl episodes list | head`."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # what is still buffered is flushed at exit
    sys.exit(EXIT_BROKEN_PIPE)


def _end(console: Console, error: BaseException, code: int, text: str = "", *, keep: bool = False) -> NoReturn:
    from kestrl._app.error_text import error_lines

    first, *following = error_lines(error, text=text, keep=keep)
    with suppress(OSError):  # nobody can read stderr; the exit code says it still
        for line in (f"error: {first}", *following):
            console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
