"""A process guard: kills a command and all its descendants when the owner of the guard ends or closes the guard's pipe.

Run as `python -I -S process_guard.py FD GRACE COMMAND...`. FD is the read end of a pipe whose write end only the owner
has; the kernel closes it when the owner ends, also on SIGKILL. The guard is the subreaper of all descendants, so that
none escapes by losing its parent or by starting a session. SIGTERM is passed on; processes that have not ended GRACE
seconds later are killed. The guard exits with the command's status (128 + the number of the signal that ended it) after
every descendant has ended.

Imports little, and only from the standard library: one guard runs for every component of `kestrl run` and every reward
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
"""Interval of checks for ended children, in addition to SIGCHLD."""


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process, from /proc."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib costs 20 ms of start-up in every guard
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as listing:  # noqa: PTH123
                pids += [int(child) for child in listing.read().split()]
    return pids


def kill_descendants() -> None:
    """Kills all descendants. Orphans are reparented to this process, so the passes terminate."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        below = children(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0] not in below:
                pass


def start(command: list[str]) -> int:
    """Starts the command, which is killed when the guard ends."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the guard ended before the line above
            os._exit(1)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(command[0], command)  # noqa: S606 - the plan's own command
    except OSError as error:
        os.write(2, f"error: cannot start {command[0]}: {error}\n".encode())
        os._exit(127)


def reap(main: int) -> int | None:
    """Reaps ended children; returns the command's wait status if it has ended."""
    main_status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main:
                main_status = status
    return main_status


def watch(owner: int, main: int, wake: int, grace: float, sigterm_times: list[float]) -> int:
    """Waits until the command or the owner has ended, or the grace period after SIGTERM is over."""
    poll = select.poll()  # select() takes no descriptor above 1,023: an owner with many has its pipe there
    for descriptor in (owner, wake):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(POLL_SECONDS * 1000)}
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        if owner in ready and os.read(owner, 1) == b"":
            return signal.SIGKILL
        status = reap(main)
        if status is not None:
            return status
        if sigterm_times and time.monotonic() - sigterm_times[0] > grace:
            return signal.SIGKILL


def close_inherited(kept_descriptors: set[int]) -> None:
    """Closes file descriptors inherited for the command, so that its connections close when it ends."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        descriptor = int(name)
        if descriptor > 2 and descriptor not in kept_descriptors:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(descriptor)


def main() -> int:
    owner, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    sigterm_times: list[float] = []
    pid = start(command)
    close_inherited({owner, wake_read, wake_write})

    def forward(_number: int, _frame: object) -> None:
        sigterm_times.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    status = watch(owner, pid, wake_read, grace, sigterm_times)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
