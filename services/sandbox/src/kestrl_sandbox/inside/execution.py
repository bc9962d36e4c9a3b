"""One run of code, from the request to the last byte of its output, as the supervisor drives it.

Nothing here waits for the code: every descriptor that it has the other end of is read and written without blocking, up
to the deadline.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kestrl_sandbox.inside import reports
from kestrl_sandbox.inside.child import HAS_PIDFD, Child
from kestrl_sandbox.inside.watched import running_threads, used_memory

CHUNK = 1 << 16
TICK = 0.1
"""Seconds between two looks at the memory of all processes, where no cgroup counts it, and at their number, where the
kernel does not limit it."""
KILL_SECONDS = 0.001
"""Pause between two attempts to end all processes."""


@dataclass(slots=True)
class CapturedStream:
    """One output stream: what is kept, and how much there was."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, part: bytes) -> None:
        self.total += len(part)
        self.kept += part[: max(0, self.limit - len(self.kept))]


class Execution:
    """One run of code."""

    def __init__(
        self, connection: socket.socket, child: Child, header: Mapping[str, Any], limits: Mapping[str, Any]
    ) -> None:
        self.connection, self.child, self.limits = connection, child, limits
        self.stdout, self.stderr = CapturedStream(header["output_limit"]), CapturedStream(header["output_limit"])
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout"]
        self.memory = header["memory_mb"] << 20
        self.session = header["session"]
        self.kind, self.code = "exited", 0
        self.display: str | None = None
        self.error: dict[str, str] | None = None
        self.finished_cell = False
        self.service_gone = False
        self.ended: float | None = None
        self._number = b""
        self._feeds: dict[int, memoryview] = {}
        self._open = {child.stdout: self.stdout, child.stderr: self.stderr}
        self._poll = select.poll()
        for descriptor in (child.stdout, child.stderr, child.ended, child.control.fileno(), connection.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def hand_over(self, request: Mapping[str, Any], code: bytes, stdin: bytes) -> None:
        """Gives the process its code, and in a session the standard streams of the cell."""
        child = self.child
        code_end, code_feed = os.pipe()
        passed, parents_ends = [code_end], [code_end]
        stdin_feed, child.stdin = child.stdin, -1
        if self.session:
            self._number = reports.new_number()
            if stdin_feed >= 0:
                os.close(stdin_feed)  # of the start, which no cell reads
            stdin_end, stdin_feed = os.pipe()
            passed, parents_ends = [code_end, stdin_end, *child.outputs], [code_end, stdin_end]
        else:
            parents_ends += child.outputs
        packet = json.dumps({**request, "number": self._number.hex()}).encode()
        with suppress(OSError):  # its process has ended, or takes no cell any more: the pidfd or the deadline shows it
            socket.send_fds(child.control, [packet], passed)
        for descriptor in parents_ends:
            os.close(descriptor)
        self._feed(code_feed, code)
        self._feed(stdin_feed, stdin)

    def wait(self) -> None:
        """Runs until the code has ended, is out of time or memory, or the service cancels."""
        watched = self.limits["watch_memory"] or self.limits["watch_processes"]
        next_look = self.started + TICK if watched else float("inf")
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                self.kind = "timeout"
                break
            if now >= next_look:
                next_look = now + TICK
                if above := self._above_limit():
                    self.kind = above
                    break
            ready = self._poll.poll(max(0.0, min(self.deadline, next_look) - now) * 1000 + 1)
            if any(self._handle(descriptor, event) for descriptor, event in ready):
                break
        self.ended = time.monotonic()
        for descriptor in list(self._feeds):
            self._end_feed(descriptor)

    def _above_limit(self) -> str:
        """Kind of the watched limit that is exceeded; empty if none is."""
        if self.limits["watch_memory"] and used_memory(self.limits["base_anonymous"]) > self.memory:
            return "memory"
        if self.limits["watch_processes"] and running_threads() > self.limits["processes"]:
            return "processes"
        return ""

    def _handle(self, descriptor: int, event: int) -> bool:
        """Handles one ready descriptor; True when the run has ended."""
        child = self.child
        if descriptor in self._open:
            self._read(descriptor)
        elif descriptor in self._feeds:
            self._write(descriptor, event)
        elif descriptor == child.ended:
            return self._reap()
        elif descriptor == self.connection.fileno():
            self.service_gone = True  # it sends nothing during a run: it has closed the connection
            return True
        elif descriptor == child.control.fileno():
            return self._cell_ended()
        return False

    def _read(self, descriptor: int) -> int:
        """Reads what there is, up to a chunk; 0 at the end of the stream or without data."""
        try:
            part = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return 0
        if part:
            self._open[descriptor].add(part)
        else:
            self._poll.unregister(descriptor)
            del self._open[descriptor]
        return len(part)

    def _feed(self, descriptor: int, content: bytes) -> None:
        """Begins to write to a pipe, which ends behind the content."""
        if not content:
            os.close(descriptor)
            return
        os.set_blocking(descriptor, False)
        self._feeds[descriptor] = memoryview(content)
        self._poll.register(descriptor, select.POLLOUT)

    def _write(self, descriptor: int, event: int) -> None:
        remaining = self._feeds[descriptor]
        try:
            count = 0 if event & select.POLLERR else os.write(descriptor, remaining[:CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            count = 0
        self._feeds[descriptor] = remaining[count:]
        if not count or count == len(remaining):
            self._end_feed(descriptor)

    def _end_feed(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._feeds[descriptor]
        os.close(descriptor)

    def _cell_ended(self) -> bool:
        """Takes a report of the end of the cell. Another process of the code, or an earlier cell, gives none."""
        try:
            packet, sender = reports.receive(self.child.control)
        except BlockingIOError:
            return False
        except OSError:
            packet, sender = b"", 0
        if not packet:
            self._poll.unregister(self.child.control)
            return False  # its process has ended, which the pidfd reports, or has closed it
        ending = reports.decode(packet, self._number) if self.session and sender == self.child.pid else None
        if ending is None:
            return False
        self.code, self.display, self.error = ending.status, ending.display, ending.error
        if ending.memory:
            self.kind = "memory"
        self.finished_cell = True
        return True

    def _reap(self) -> bool:
        """Takes the exit status; False if it was another process that ended."""
        if not HAS_PIDFD:
            with suppress(BlockingIOError):
                os.read(self.child.ended, CHUNK)
        pid, wait_status = os.waitpid(self.child.pid, os.WNOHANG)
        if pid == 0:
            return False
        status = os.waitstatus_to_exitcode(wait_status)
        if status < 0:
            self.kind, self.code = "signaled", -status
        else:
            self.code = status
            # The code may have written the byte, about nothing but itself.
            if status == 1 and self.child.memory[0]:
                self.kind = "memory"
        return True

    def end_all(self) -> None:
        """Kills every process of the sandbox and waits until none is left."""
        while True:
            # Again and again: gVisor's kernel may miss a process that is just being forked.
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(KILL_SECONDS)

    def drain(self) -> None:
        """Reads what is in the pipes now: processes that a session keeps may write without end."""
        for descriptor in list(self._open):
            waiting = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), "little")
            while waiting > 0 and (count := self._read(descriptor)):
                waiting -= count

    def answer(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "code": self.code,
            "seconds": (self.ended or time.monotonic()) - self.started,
            "stdout": len(self.stdout.kept),
            "stderr": len(self.stderr.kept),
            "stdout_total": self.stdout.total,
            "stderr_total": self.stderr.total,
            "display": self.display,
            "error": self.error,
        }
