"""Other programs: run to their end, with their error output in the exception when they fail; and polling where there is
no event."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

POLL_SECONDS = 0.05
COMMAND_SECONDS = 120.0


class CommandFailed(RuntimeError):
    """A program failed or did not end in time."""

    def __init__(self, command: list[str], status: int | None, output: str, complaint: str) -> None:
        how = "did not end in time" if status is None else f"ended with {status}"
        super().__init__(f"{' '.join(command)} {how}\n{output}{complaint}".rstrip())
        self.status = status
        """None if it was killed because of the time-out."""
        self.output = output
        self.complaint = complaint
        """Its error output."""


def run(
    *command: str | Path,
    given: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = COMMAND_SECONDS,
) -> str:
    """Runs a program; returns its output.

    Args:
        command: Program and arguments.
        given: Standard input, if any.
        env: Variables in addition to this process's own.
        seconds: Time-out, after which it is killed.

    Raises:
        CommandFailed: Its status is not 0, or it did not end in time.
    """
    words = list(map(str, command))
    try:
        done = subprocess.run(
            words,
            input="" if given is None else given,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
            env=None if env is None else {**os.environ, **env},
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(words, None, _text(error.stdout), _text(error.stderr)) from error
    if done.returncode != 0:
        raise CommandFailed(words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def _text(written: bytes | str | None) -> str:
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


def eventually(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """Polls until a condition holds, for changes in another process that cause no event.

    Raises:
        TimeoutError: It did not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:.0f} s")
        time.sleep(POLL_SECONDS)
