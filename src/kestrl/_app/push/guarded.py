"""Programs of other environments that end with this one, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from kestrl._app.interpreters.places import without_python
from kestrl._shared.processes import process_guard

STOP_SECONDS = 10.0


@contextmanager
def guarded(
    command: Sequence[str], *, variables: dict[str, str], stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Generator[subprocess.Popen[bytes]]:
    """A program under a process guard. At the end of the block it and all that it started have ended.

    Args:
        command: The program and its arguments.
        variables: Environment variables beside those of this process.
        stdin: Its input.
        stdout: Its output.
        stderr: Its errors.
    """
    read_end, pipe = os.pipe()
    guard = (sys.executable, "-I", "-S", process_guard.__file__, str(read_end), str(STOP_SECONDS))
    try:
        process = subprocess.Popen(  # noqa: S603 - an interpreter that we made
            [*guard, *command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**without_python(os.environ), **variables},
            pass_fds=(read_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(pipe)
        raise
    finally:
        os.close(read_end)
    try:
        with process:
            try:
                yield process
            finally:
                _end(process)
    finally:
        os.close(pipe)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the program to end; the guard kills what is left of it after `STOP_SECONDS`."""
    if process.stdin is not None:
        with suppress(OSError):  # what is not written yet has no reader any more
            process.stdin.close()
    process.terminate()
