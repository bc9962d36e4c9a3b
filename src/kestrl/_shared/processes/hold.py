"""`python -m kestrl._shared.processes.hold`: does nothing until it is ended, for a pod that holds a volume."""

from __future__ import annotations

import signal

ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


def hold() -> None:
    """Waits for SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    signal.sigwait(ENDING)


if __name__ == "__main__":
    hold()
