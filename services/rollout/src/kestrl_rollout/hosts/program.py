"""Programs of agents: with a process guard, without the worker's variables, their output bounded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from kestrl._shared.processes import process_guard

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Variables that programs inherit: none with a credential of the worker."""
CHUNK = 64 * 1024


def inherited_variables() -> dict[str, str]:
    """Those of `KEPT_VARIABLES` that this process has."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


class Program:
    """A running program; `kill` ends it with all its descendants."""

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
        folder: str | None,
        stdin: int | IO[bytes],
        stdout: int,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Program:
        """Starts a program.

        Args:
            command: Program and arguments.
            variables: All its environment variables.
            folder: Where it runs; None for the worker's folder.
            stdin: As those that follow, a file of `subprocess.Popen`.
            stdout: File of its output.
            stderr: File of its errors; None for the worker's.
            pass_fds: Descriptors that it inherits.

        Raises:
            OSError: The process cannot be started.
        """
        read_end, write_end = os.pipe()
        try:
            # Not asyncio's, whose fork under uvloop is not safe beside gRPC's threads.
            process = subprocess.Popen(  # noqa: S603 - the manifest's own command
                [sys.executable, "-I", "-S", process_guard.__file__, str(read_end), "0", *command],
                pass_fds=(read_end, *pass_fds),
                env=dict(variables),
                cwd=folder,
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end)

    async def output(self, most: int, most_errors: int) -> tuple[bytes, bytes]:
        """The ends of stdout and stderr, at most so many bytes of each, once all its processes have ended."""
        out, errors = await asyncio.gather(_tail(self.process.stdout, most), _tail(self.process.stderr, most_errors))
        await asyncio.to_thread(self.process.wait)  # at once: the guard has closed its files
        return out, errors

    async def kill(self) -> None:
        """Ends the program with all its descendants, and waits for that."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        await asyncio.shield(asyncio.to_thread(self.process.wait))


async def _tail(pipe: Any, most: int) -> bytes:
    """The last bytes of a pipe, at its end."""
    reader = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    kept = bytearray()
    try:
        while chunk := await reader.read(CHUNK):
            kept += chunk
            if len(kept) > 2 * most:
                del kept[:-most]
    finally:
        transport.close()
    return bytes(kept[-most:])
