"""The process that runs the code: how the supervisor starts it, and what it does."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kestrl_sandbox.inside import frames, payload
from kestrl_sandbox.inside.confinement import become_user, confine

CONTROL_SECONDS = 2.0
"""Limit of one message to or from the process for the code, which may stop in the middle of it."""
PREPARING, RUNNING, EXHAUSTED = 2, 0, 1


@dataclass(slots=True)
class Child:
    """The process that runs the code, and what connects it to the supervisor."""

    pid: int
    ended: int
    """Descriptor that is readable when it may have ended: a pidfd, or the read end of `SIGCHLD`'s pipe."""
    stdin: int
    stdout: int
    stderr: int
    control: socket.socket
    state: mmap.mmap
    """One byte: PREPARING, RUNNING or EXHAUSTED."""


def start_child(limits: Mapping[str, Any], keep: socket.socket) -> Child:
    """Forks the process for the code, which waits for it without any right.

    Args:
        limits: As of the pool's configuration.
        keep: The connection to the service, which the child closes.
    """
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    ours, theirs = socket.socketpair()
    flag = mmap.mmap(-1, 1)
    flag[0] = PREPARING
    signalled = None if HAS_PIDFD else sigchld_pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if signalled is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for number, descriptor in enumerate((stdin[0], stdout[1], stderr[1])):
                os.dup2(descriptor, number)
            keep.detach()
            control = os.dup2(theirs.fileno(), 3, inheritable=False)
            theirs.detach()
            ours.detach()
            os.closerange(4, 1 << 16)
            os.chdir("/work")
            _prefer_for_oom()
            if limits["own_user"]:
                become_user()
            confine(limits)
            _work(socket.socket(fileno=control), flag)
        except (OSError, ValueError) as error:
            os.write(2, f"the sandbox could not be prepared: {error}".encode())
        finally:
            os._exit(125)
    for descriptor in (stdin[0], stdout[1], stderr[1]):
        os.close(descriptor)
    theirs.close()
    ours.settimeout(CONTROL_SECONDS)
    for descriptor in (stdin[1], stdout[0], stderr[0]):
        os.set_blocking(descriptor, False)
    ended = os.pidfd_open(pid) if signalled is None else signalled
    return Child(pid, ended, stdin[1], stdout[0], stderr[0], ours, flag)


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


def _work(control: socket.socket, flag: mmap.mmap) -> None:
    """Runs what the supervisor sends: one program, or the cells of a session."""
    module = payload.fresh_main()
    received = frames.receive(control)
    if received is None:
        return
    request, code = received
    flag[0] = RUNNING
    if not request["session"]:
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        text = code.decode("utf-8", "surrogateescape")
        if request["language"] == "bash":
            payload.exec_bash(text)
        ended = payload.run_python(text, module, request["echo"])
        flag[0] = EXHAUSTED if ended.memory else RUNNING
        os._exit(payload.finish(ended.status))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    while True:
        payload.take_stdin(control)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], hard))
        text = code.decode("utf-8", "surrogateescape")
        if request["language"] == "bash":
            ended = payload.Ended(payload.run_bash(text))
        else:
            ended = payload.run_python(text, module, request["echo"])
        payload.flush()
        control.sendall(frames.encode(asdict(ended)))
        received = frames.receive(control)
        if received is None:
            return
        request, code = received
