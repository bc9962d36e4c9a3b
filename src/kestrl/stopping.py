"""SIGTERM while a program starts. Importing this module installs the handler; programs import it before anything heavy.

The kernel drops a SIGTERM for PID 1 of a container that has no handler for it, and importing torch takes seconds: a pod deleted then
ran on until its grace period was over. `kestrl.rpc.serve` replaces the handler by one that drains.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM
"""What a shell reports of a program that SIGTERM ended."""
ABANDONED = "abandoned-"
"""How the names of threads begin that nobody waits for at the end."""


def _stop(_number: int, _frame: object) -> NoReturn:
    sys.stderr.write("stopped by SIGTERM while starting\n")
    raise SystemExit(EXIT_STOPPED)


def leave(code: int) -> int:
    """The exit code; where a thread still does work that nobody wants any more, the process ends at once with it."""
    if any(thread.name.startswith(ABANDONED) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter's own end would take the thread's stack down in the middle of native code
    return code


if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _stop)
