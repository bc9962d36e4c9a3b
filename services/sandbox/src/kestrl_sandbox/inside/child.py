"""The process that runs the code: how the supervisor starts it, and what it does.

Nothing that the supervisor trusts can be reached once the code runs. That the process was prepared is said on a pipe
that is closed before. What the code can reach is the byte that says that memory ran out, which counts beside exit
status 1 alone, and in a session the connection to the supervisor, where reports are taken by their form only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrl_sandbox.inside import payload, reports
from kestrl_sandbox.inside.confinement import become_user, confine
from kestrl_sandbox.inside.reports import Ended

PREPARE_SECONDS = 10.0
MAX_REQUEST = 4096
MAX_REASON = 4096
UNPREPARED = 125
_CONNECTION, _PREPARED, _FIRST_FREE = 3, 4, 5


@dataclass(slots=True)
class Child:
    """The process that runs the code, and what connects it to the supervisor."""

    pid: int
    ended: int
    """Descriptor that is readable when it may have ended: a pidfd, or the read end of `SIGCHLD`'s pipe."""
    prepared: int
    """Read end of a pipe with a byte once it has no right left, and its end before the code runs."""
    stdin: int
    stdout: int
    stderr: int
    outputs: tuple[int, int]
    """Write ends of the outputs, which a session's cells get anew; closed where there is no session."""
    control: socket.socket
    memory: mmap.mmap
    """One byte, 1 when the code ended by a lack of memory."""


def start_child(limits: Mapping[str, Any], keep: socket.socket) -> Child:
    """Forks the process for the code, which waits for it without any right.

    Args:
        limits: As of the pool's configuration.
        keep: The connection to the service, which the child closes.
    """
    stdin, stdout, stderr, prepared = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    ours, theirs = reports.packet_sockets()
    memory = mmap.mmap(-1, 1)
    signalled = None if HAS_PIDFD else sigchld_pipe()
    pid = os.fork()
    if pid == 0:
        status = UNPREPARED
        try:
            if signalled is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (keep, ours):
                connection.detach()
            _keep_only((stdin[0], stdout[1], stderr[1], theirs.detach(), prepared[1]))
            _prepare(limits)
            _work(socket.socket(fileno=_CONNECTION), memory)
        finally:
            os._exit(status)
    for descriptor in (stdin[0], prepared[1]):
        os.close(descriptor)
    theirs.close()
    for descriptor in (stdin[1], stdout[0], stderr[0]):
        os.set_blocking(descriptor, False)
    pidfd = os.pidfd_open(pid) if signalled is None else signalled
    return Child(
        pid, pidfd, prepared[0], stdin[1], stdout[0], stderr[0], (stdout[1], stderr[1]), control=ours, memory=memory
    )


def _keep_only(descriptors: Sequence[int]) -> None:
    """Gives descriptors the numbers 0 to 4, the last two only for this process, and closes all others."""
    _renumber(descriptors)
    os.closerange(_FIRST_FREE, 1 << 16)


def _renumber(descriptors: Sequence[int]) -> None:
    """Gives descriptors the numbers from 0 on, whichever they have, and closes the copies."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, copy in enumerate(copies):
        os.dup2(copy, number, inheritable=number < _CONNECTION)
        os.close(copy)


def _prepare(limits: Mapping[str, Any]) -> None:
    """Takes all rights from this process and says so, or ends it with the reason on standard error."""
    try:
        os.setsid()
        os.chdir("/work")
        _prefer_for_oom()
        if limits["own_user"]:
            become_user()
        confine(limits)
    except (OSError, ValueError) as error:
        os.write(2, str(error).encode("utf-8", "replace")[:MAX_REASON])
        os._exit(UNPREPARED)
    os.write(_PREPARED, b"p")
    os.close(_PREPARED)


def reason_unprepared(child: Child) -> str:
    """Waits until a process has no right left; the reason if it could not be prepared, empty if it was."""
    if child.prepared < 0:
        return ""
    poll = select.poll()
    poll.register(child.prepared, select.POLLIN)
    if not poll.poll(PREPARE_SECONDS * 1000):
        return f"it was not prepared within {PREPARE_SECONDS:g} s"
    signal_byte = os.read(child.prepared, 1)
    os.close(child.prepared)
    child.prepared = -1
    if signal_byte:
        return ""
    _, status = os.waitpid(child.pid, 0)
    try:
        reason = os.read(child.stderr, MAX_REASON).decode(errors="replace")
    except BlockingIOError:
        reason = ""
    return reason or f"exit status {os.waitstatus_to_exitcode(status)}"


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return False
        raise
    return True


HAS_PIDFD = _has_pidfd()
"""Whether the kernel has pidfds; gVisor's does not."""


def sigchld_pipe() -> int:
    """Read end of a pipe that every `SIGCHLD` writes to."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return reading


def _prefer_for_oom() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        return  # there is no /proc in this sandbox


def _work(control: socket.socket, memory: mmap.mmap) -> None:
    """Runs what the supervisor sends: one program, or the cells of a session."""
    module = payload.fresh_main()
    received = _received(control)
    if received is None:
        return
    request, code, descriptors = received
    if not request["session"]:
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        if request["language"] == "bash":
            payload.exec_bash(code)
        ending = payload.run_python(code, module, request["echo"])
        if ending.memory:
            memory[0] = 1
        os._exit(payload.finish(ending.status))
    # A process that the code forks reports nothing, and takes no later cell.
    os.register_at_fork(after_in_child=control.close)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pid = os.getpid()
    streams = None
    while True:
        # What the code has left of its streams is no longer in the way of a cell.
        _renumber(descriptors)
        if streams is None:
            streams = payload.new_streams()
        else:
            payload.restore_streams(streams)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], hard))
        if request["language"] == "bash":
            ending = Ended(payload.run_bash(code))
        else:
            ending = payload.run_python(code, module, request["echo"])
        if os.getpid() != pid:  # a process that the code has forked, which ends as one of a program does
            os._exit(payload.finish(ending.status))
        if not payload.settle_streams(streams):
            streams = None
        try:
            reports.send(control, ending, bytes.fromhex(request["number"]))
        except OSError:
            os.write(2, b"the code has closed the connection of its session\n")
            return
        received = _received(control)
        if received is None:
            return
        request, code, descriptors = received


def _received(control: socket.socket) -> tuple[dict[str, Any], str, list[int]] | None:
    """The next request, its code, and a session's descriptors for the standard streams; None at the end."""
    packet, descriptors, _flags, _address = socket.recv_fds(control, MAX_REQUEST, 4)
    if not packet or not descriptors:
        return None
    with open(descriptors[0], "rb") as file:
        code = file.read()
    return json.loads(packet), code.decode("utf-8", "surrogateescape"), descriptors[1:]
