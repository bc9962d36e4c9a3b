"""Process 1 of a sandbox: starts the process for the code, drains its output, keeps the deadline, and answers.

When it ends, the kernel kills everything in the sandbox and frees its mounts. It has no capability either. No process
of the code can signal or trace it: signals to process 1 from inside have no effect, and it is not dumpable.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from kestrl_sandbox.inside import files, frames, payload
from kestrl_sandbox.inside.child import EXHAUSTED, HAS_PIDFD, PREPARING, Child, start_child

CHUNK = 1 << 16
TICK = 0.1
"""Seconds between two looks at the memory of all processes, where no cgroup counts it, and at their number, where the
kernel does not limit it."""
DRAIN_SECONDS = 1.0
KILL_SECONDS = 0.001
"""Pause between two attempts to end all processes."""
ENDED = 3
"""Exit status when the service has closed the connection."""


@dataclass(slots=True)
class Output:
    """One output stream: what is kept, and how much there was."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, part: bytes) -> None:
        self.total += len(part)
        self.kept += part[: max(0, self.limit - len(self.kept))]


def serve(connection: socket.socket, limits: Mapping[str, Any]) -> int:
    """Answers one request, or those of one session; the exit status of the supervisor."""
    child = start_child(limits, connection)
    while True:
        received = frames.receive(connection)
        if received is None:
            return ENDED
        header, body = received
        answer, content, alive = run(connection, child, header, body, limits)
        if answer is None:
            return ENDED
        connection.sendall(frames.encode(answer, content))
        if not alive:
            return 0


def run(
    connection: socket.socket, child: Child, header: Mapping[str, Any], body: bytes, limits: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, bytes, bool]:
    """Runs one request: answer, its content, and whether the sandbox lives on."""
    code, stdin = body[: header["code"]], body[header["code"] : header["code"] + header["stdin"]]
    refused = files.write_all(header["files"], body[header["code"] + header["stdin"] :])
    if refused:
        return {"kind": "refused", "reason": refused, "alive": header["session"]}, b"", header["session"]
    memory = (header["memory_mb"] << 20) + limits["base_bytes"]
    request = {"session": header["session"], "language": header["language"], "echo": header["echo"], "memory": memory}
    execution = Execution(connection, child, header, stdin, limits)
    try:
        child.control.sendall(frames.encode(request, code))
        if header["session"]:
            _give_stdin(child)
    except OSError:
        pass  # it is dead already, which is seen below
    execution.feed_stdin()
    execution.wait()
    if execution.service_gone:
        return None, b"", False
    alive = bool(header["session"]) and execution.finished_cell
    if not alive:
        execution.end_all()
    execution.drain()
    found, content = files.read_all(header["fetch"], header["max_file"])
    answer = execution.answer() | {"files": found, "alive": alive}
    return answer, bytes(execution.stdout.kept + execution.stderr.kept) + content, alive


def _give_stdin(child: Child) -> None:
    """Sends a session's process a pipe for the standard input of one cell, which ends as a file's does."""
    reading, writing = os.pipe()
    try:
        socket.send_fds(child.control, [b"i"], [reading])
    finally:
        os.close(reading)
        if child.stdin >= 0:
            os.close(child.stdin)
        child.stdin = writing
        os.set_blocking(writing, False)


class Execution:
    """One run of code from its start to the last byte of its output."""

    def __init__(
        self,
        connection: socket.socket,
        child: Child,
        header: Mapping[str, Any],
        stdin: bytes,
        limits: Mapping[str, Any],
    ) -> None:
        self.connection, self.child, self.limits = connection, child, limits
        self.stdout, self.stderr = Output(header["output_limit"]), Output(header["output_limit"])
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout"]
        self.memory = header["memory_mb"] << 20
        self.session = header["session"]
        self.stdin = memoryview(stdin)
        self.kind, self.code = "exited", 0
        self.display: str | None = None
        self.error: dict[str, str] | None = None
        self.finished_cell = False
        self.service_gone = False
        self.ended: float | None = None
        self._open = {child.stdout: self.stdout, child.stderr: self.stderr}
        self._poll = select.poll()
        for descriptor in (child.stdout, child.stderr, child.ended, child.control.fileno(), connection.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def feed_stdin(self) -> None:
        """Begins to write standard input; without any it ends at once."""
        if self.stdin:
            self._poll.register(self.child.stdin, select.POLLOUT)
        else:
            self._close_stdin()

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
        elif descriptor == child.stdin:
            self._feed(event)
        elif descriptor == child.ended:
            return self._reap()
        elif descriptor == self.connection.fileno():
            self.service_gone = True  # it sends nothing during a run: it has closed the connection
            return True
        elif descriptor == child.control.fileno():
            return self._cell_ended()
        return False

    def _read(self, descriptor: int) -> bool:
        """Reads what there is, up to a chunk; False at the end of the stream or without data."""
        try:
            part = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if part:
            self._open[descriptor].add(part)
            return True
        self._poll.unregister(descriptor)
        del self._open[descriptor]
        return False

    def _feed(self, event: int) -> None:
        try:
            sent = 0 if event & select.POLLERR else os.write(self.child.stdin, self.stdin[:CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            sent = 0
        self.stdin = self.stdin[sent:]
        if not self.stdin or not sent:
            self._poll.unregister(self.child.stdin)
            self._close_stdin()

    def _close_stdin(self) -> None:
        os.close(self.child.stdin)
        self.child.stdin = -1

    def _cell_ended(self) -> bool:
        """Reads the end of a session's cell. The code could write it too, about nothing but itself."""
        if not self.session:
            self._poll.unregister(self.child.control)
            return False
        try:
            received = frames.receive(self.child.control)
        except (ValueError, OSError):
            received = None
        if received is None:
            self._poll.unregister(self.child.control)
            return False  # its process has ended: the pidfd reports it
        ended = ended_of(received[0])
        self.code, self.display, self.error = ended.status & 0xFF, ended.display, ended.error
        if ended.memory:
            self.kind = "memory"
        self.finished_cell = True
        return True

    def _reap(self) -> bool:
        """Takes the exit status; False if it was another process that ended."""
        if not HAS_PIDFD:
            with suppress(BlockingIOError):
                os.read(self.child.ended, CHUNK)
        pid, found = os.waitpid(self.child.pid, os.WNOHANG)
        if pid == 0:
            return False
        status = os.waitstatus_to_exitcode(found)
        if status < 0:
            self.kind, self.code = "signaled", -status
        else:
            self.code = status
        if self.child.state[0] == EXHAUSTED:
            self.kind = "memory"
        elif self.child.state[0] == PREPARING:
            self.kind = "unprepared"
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
        """Reads what is left in the pipes."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for descriptor in list(self._open):
            while time.monotonic() < deadline and self._read(descriptor):
                pass

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


def ended_of(message: object) -> payload.Ended:
    """What a cell's process reported; the code may have written it, so that only its form is trusted."""
    fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
    status, display, error = fields.get("status"), fields.get("display"), fields.get("error")
    names = ("type", "text", "traceback")
    parts = cast("dict[str, Any]", error) if isinstance(error, dict) else None
    shown = None if parts is None else {name: str(parts.get(name, "")) for name in names}
    return payload.Ended(
        status=status if isinstance(status, int) else 1,
        memory=fields.get("memory") is True,
        display=display if isinstance(display, str) else None,
        error=shown,
    )


def used_memory(base: int) -> int:
    """Bytes of memory of all processes of the sandbox, each without what it shares with the zygote."""
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        total += max(0, anonymous_memory(name) - base)
    return total


def running_threads() -> int:
    """Threads of all processes of the sandbox, without the supervisor."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status", encoding="ascii", errors="replace") as file:
                    total += next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
            except (FileNotFoundError, ProcessLookupError):
                continue
    return total


def anonymous_memory(pid: str) -> int:
    """Bytes of anonymous and shared memory of a process; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("Rss", "VmRSS:"))}
    names = ("RssAnon", "RssShmem") if "RssAnon" in found else ("VmRSS",)  # gVisor's kernel does not tell them apart
    return sum(int(found[name]) << 10 for name in names if name in found)
