"""Programs of other environments that end with this one, also when it is killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from kestrl._app.interpreters.places import without_python
from kestrl._shared.processes.guarded import GuardedProcess

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
    program = GuardedProcess.start(
        command,
        variables={**without_python(os.environ), **variables},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        grace=STOP_SECONDS,
    )
    try:
        with program.process:
            try:
                yield program.process
            finally:
                _end(program.process)
    finally:
        program.release()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the program to end; the guard kills what is left of it after `STOP_SECONDS`."""
    if process.stdin is not None:
        with suppress(OSError):  # what is not written yet has no reader any more
            process.stdin.close()
    process.terminate()
