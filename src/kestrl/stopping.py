"""Handling of SIGTERM while a program starts. Importing this module installs the handler; programs import it before
slow imports.

The kernel drops a SIGTERM for PID 1 of a container without a handler, and importing torch takes seconds: a pod deleted
at that time would run until its grace period is over. `kestrl.rpc.serve` replaces the handler by one that drains.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM
"""Exit status of a program ended by SIGTERM, as reported by a shell."""
ABANDONED = "abandoned-"
"""Name prefix of threads that are not joined at exit."""


def _stop(_number: int, _frame: object) -> NoReturn:
    sys.stderr.write("stopped by SIGTERM while starting\n")
    raise SystemExit(EXIT_STOPPED)


def leave(code: int) -> int:
    """Returns the exit code; if an abandoned thread is still running, exits the process immediately."""
    if any(thread.name.startswith(ABANDONED) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # interpreter shutdown would interrupt the thread in native code
    return code


if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _stop)
