"""Process 1 of a sandbox: starts the process for the code, runs what the service sends, and answers.

When it ends, the kernel kills everything in the sandbox and frees its mounts. It has no capability either. No process
of the code can signal it, trace it, or change its limits and its priority: signals to process 1 from inside have no
effect, it is not dumpable, and the filter refuses what would change it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping
from typing import Any

from kestrl_sandbox.inside import files, frames
from kestrl_sandbox.inside.child import HAS_PIDFD, Child, reason_unprepared, start_child
from kestrl_sandbox.inside.execution import Execution

ENDED = 3
"""Exit status when the service has closed the connection."""


def serve(connection: socket.socket, limits: Mapping[str, Any]) -> int:
    """Answers one request, or those of one session; the exit status of the supervisor.

    Before the code of a request runs, a message says so: what fails later is the code's doing.
    """
    child = start_child(limits, connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets from inside the signals that it has a handler for
    while True:
        received = frames.receive(connection)
        if received is None:
            return ENDED
        header, body = received
        if reason := reason_unprepared(child):
            connection.sendall(frames.encode({"kind": "unprepared", "reason": reason, "alive": False}))
            return 0
        connection.sendall(frames.encode({"kind": "started"}))
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
    if has_ended(child):
        return {"kind": "gone", "alive": False}, b"", False
    code, stdin = body[: header["code"]], body[header["code"] : header["code"] + header["stdin"]]
    refused = files.write_all(header["files"], body[header["code"] + header["stdin"] :])
    if refused:
        return {"kind": "refused", "reason": refused, "alive": header["session"]}, b"", header["session"]
    memory = (header["memory_mb"] << 20) + limits["base_bytes"]
    request = {"session": header["session"], "language": header["language"], "echo": header["echo"], "memory": memory}
    execution = Execution(connection, child, header, limits)
    execution.hand_over(request, code, stdin)
    execution.wait()
    if execution.service_gone:
        return None, b"", False
    alive = bool(header["session"]) and execution.finished_cell
    if not alive:
        execution.end_all()
    execution.drain()
    fetched, content = files.read_all(header["fetch"], header["max_file"])
    answer = execution.answer() | {"files": fetched, "alive": alive}
    return answer, bytes(execution.stdout.kept + execution.stderr.kept) + content, alive


def has_ended(child: Child) -> bool:
    """Whether the process of a session has ended since its last cell."""
    if HAS_PIDFD:
        poll = select.poll()
        poll.register(child.ended, select.POLLIN)
        return bool(poll.poll(0))
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
