"""Programs under a process guard: started without anybody's credentials, and ended with all that they started.

The boundary for user code: whatever a program does, nothing of it is left once it was ended, or once its owner has
ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Self

from kestrl._shared.processes import process_guard

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Variables that programs of others inherit: none with a credential."""
OUR_VARIABLES = "KESTRL_"
"""How the names of our credentials begin."""
File = int | IO[bytes] | None


def kept_variables() -> dict[str, str]:
    """Those of `KEPT_VARIABLES` that this process has: the environment of a program that is not the job's own code."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def variables_without_ours() -> dict[str, str]:
    """The variables of this process without our credentials: the environment of the job's own code, which must not act
    as the component that runs it.
    """
    return {name: text for name, text in os.environ.items() if not name.startswith(OUR_VARIABLES)}


def guard_command(pipe: int, command: Sequence[str], *, grace: float = 0.0) -> list[str]:
    """The command line of a guard.

    Args:
        pipe: Read end of its owner's pipe, which it inherits.
        command: What it runs.
        grace: Seconds after SIGTERM after which it kills.
    """
    return [sys.executable, "-I", "-S", process_guard.__file__, str(pipe), f"{grace:g}", *command]


def ending(status: int) -> str:
    """How a guarded program has ended, by its exit status: a signal's name or an exit code."""
    number = -status if status < 0 else status - 128  # negative if the guard itself was killed
    return f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {status}"


class GuardedProcess:
    """A running program; once it is released or killed, it and all its descendants end."""

    def __init__(self, process: subprocess.Popen[bytes], write_end: int) -> None:
        self.process = process
        self._write_end = write_end
        """Write end of the process guard's pipe: closing it kills the program and its descendants."""

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
        folder: str | os.PathLike[str] | None = None,
        pass_fds: Sequence[int] = (),
        grace: float = 0.0,
    ) -> Self:
        """Starts a program in a session of its own, so that Ctrl-C of a terminal reaches its owner alone.

        Args:
            command: Program and arguments.
            variables: All its environment variables.
            stdin: As the next two, a file of `subprocess.Popen`.
            stdout: File of its output; None for that of this process.
            stderr: File of its errors; None for that of this process.
            folder: Where it runs; None for the folder of this process.
            pass_fds: Descriptors that it inherits.
            grace: Seconds after SIGTERM after which the guard kills it.

        Raises:
            OSError: The process cannot be started.
        """
        read_end, write_end = os.pipe()
        try:
            # Not asyncio's: uvloop forks and runs Python in the child before exec, which sometimes crashes beside
            # gRPC's threads (seen: SIGSEGV in one start of ten). The standard library's vfork and exec runs nothing in
            # between, and takes a millisecond.
            process = subprocess.Popen(  # noqa: S603 - the owner's own command
                guard_command(read_end, command, grace=grace),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(read_end, *pass_fds),
                env=dict(variables),
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end)

    def release(self) -> None:
        """Has the guard kill the program and its descendants, without waiting for their end."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def wait(self, seconds: float | None = None) -> int:
        """The exit status, once the program and all its descendants have ended: 128 + the number of the signal that
        ended it.

        Raises:
            subprocess.TimeoutExpired: It has not ended within so many seconds.
        """
        return self.process.wait(seconds)

    async def kill(self) -> None:
        """Ends the program with all its descendants, and waits for that even if it is cancelled."""
        self.release()
        await asyncio.shield(asyncio.to_thread(self.process.wait))
