"""Processes that outlive the program that starts them, identified by pid and start time."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kestrl._shared.processes.process_guard import children

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""A started program would inherit these ignored signals, and its containers with it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinguished from later ones with the same pid."""

    pid: int
    started: int
    """Start time in ticks since the machine's start."""

    @staticmethod
    def of(pid: int) -> Process | None:
        status = _stat(pid)
        return None if status is None else Process(pid, status[1])

    def is_alive(self) -> bool:
        """Whether it runs or is stopped; a zombie is not alive."""
        status = _stat(self.pid)
        return status is not None and status[1] == self.started and status[0] != "Z"

    def is_stopped(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        status = _stat(self.pid)
        return status is not None and status[1] == self.started and status[0] == "T"

    def child(self) -> Process | None:
        """Its first child."""
        return next((found for pid in children(self.pid) if (found := Process.of(pid)) is not None), None)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still exists."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Waits for its end; returns whether it has ended within the time. Collects it if it is a child of this
        process."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(self.pid)
                try:
                    select.select([descriptor], [], [], seconds)
                finally:
                    os.close(descriptor)
        ended = not self.is_alive()
        if ended:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        return ended

    def memory(self) -> int:
        """Resident bytes."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time; None if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


def in_cgroup(name: str) -> list[Process]:
    """All processes of a cgroup whose path contains this name."""
    found: list[Process] = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):  # it has ended meanwhile
            if name in path.read_text() and (process := Process.of(int(path.parent.name))) is not None:
                found.append(process)
    return found


def spawn(command: Sequence[str], log: Path, env: Mapping[str, str], *, ready: int | None = None) -> Process:
    """Starts a program in a session of its own, which survives this process.

    Args:
        command: Program, by its path, and arguments.
        log: File for its output.
        env: All its variables.
        ready: A descriptor that it gets as number 3.

    Raises:
        RuntimeError: It ended at once.
    """
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), written, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if ready is not None:
        actions.append((os.POSIX_SPAWN_DUP2, ready, 3))
    pid = os.posix_spawn(
        command[0], list(command), dict(env), file_actions=actions, setsid=True, setsigdef=IGNORED_BY_PYTHON
    )
    process = Process.of(pid)
    if process is None:
        raise RuntimeError(f"{command[0]} ended at once: {tail(log)}")
    return process


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"
