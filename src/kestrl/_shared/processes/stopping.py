"""Handling of SIGTERM while a program starts. Programs call `end_at_sigterm` before slow imports.

The kernel drops a SIGTERM for PID 1 of a container without a handler, and importing torch takes seconds: a pod deleted
at that time would run until its grace period is over. `kestrl._shared.rpc.serve` replaces the handler by one that
drains.

The handler ends the process and raises nothing. An exception could appear anywhere in an import, where Python and
native modules replace it by their own (`RuntimeError: Error calling __set_name__`, `ImportError`) or drop it: the
process would end with a traceback, or not at all. A program that starts has nothing to save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM
"""Exit status of a program ended by SIGTERM, as reported by a shell."""
STDERR = 2
ABANDONED = "abandoned-"
"""Name prefix of threads that are not joined at exit."""


def end_at_sigterm() -> None:
    """Makes SIGTERM end this process at once, until something else handles it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)


def _stop(_number: int, _frame: object) -> NoReturn:
    os.write(STDERR, b"stopped by SIGTERM while starting\n")  # sys.stderr may be in the middle of a write
    os._exit(EXIT_STOPPED)


def leave(code: int) -> int:
    """Returns the exit code; if an abandoned thread is still running, exits the process immediately."""
    if any(thread.name.startswith(ABANDONED) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # interpreter shutdown would interrupt the thread in native code
    return code
