"""The keeper of an episode's process: the parent to which all that the process starts comes back, to be ended with it.

A tool may start daemons and sessions of its own; a keeper is their subreaper, so that none escapes by losing its
parent. A keeper does nothing else and has one thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

from kestrl._shared.processes.process_guard import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    kill_descendants,
    prctl,
)

_AWAITED = frozenset({signal.SIGTERM, signal.SIGCHLD})


def keep(serve: Callable[[], int], connection: int) -> NoReturn:
    """Serves an episode in a child of this process, which becomes its keeper and ends as the child did.

    Args:
        serve: What the child does; its exit status.
        connection: Descriptor of the episode's connection, which the child alone keeps.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Signals are awaited, not handled: none is lost between a look at the child and the wait for the next one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    for awaited in _AWAITED:
        signal.signal(awaited, signal.SIG_DFL)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            status = serve() if os.getppid() == keeper else 1
        finally:
            os._exit(status)
    os.close(connection)
    status = _ended(child)
    kill_descendants()
    _end_as(status)


def _ended(child: int) -> int:
    """Waits until a child ends, or has to; its wait status."""
    while True:
        for pid, status in _reaped():
            if pid == child:
                return status
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            # A process that is ending by itself closes its connection, upon which the service stops it, before it can
            # be reaped. A signal changes its status no more.
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def _end_as(status: int) -> NoReturn:
    """Ends this process by the signal, or with the exit status, of another."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def stop(keeper: int) -> None:
    """Asks a keeper that was not reaped to end its process and all that it has started."""
    with suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGTERM)


def _reaped() -> Iterator[tuple[int, int]]:
    """Children of this process that have ended, each with its wait status."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status
