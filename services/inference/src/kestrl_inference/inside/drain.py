"""The end of an engine: drained before its container ends, and at once while it starts.

Kubernetes runs this as the preStop hook of the engine's container, `python -m kestrl_inference.inside.drain PORT
SECONDS`: the engine gets its SIGTERM when this has ended, and so outlives the turns that it answers. Uses the standard
library alone, as all that runs in an engine's image.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time

from kestrl_inference.inside.guard import CONTROL_KEY, DRAIN

HEARD_SECONDS = 5.0
"""Seconds in which learner and workers have certainly heard that an engine drains."""
ASK_SECONDS = 0.5
"""Seconds between two requests to the guard."""
ANSWER_SECONDS = 5.0
"""Time limit of its answer."""


def end_at_sigterm() -> None:
    """Makes SIGTERM end this process until its server handles it: the kernel drops the signal for PID 1 of a container
    without a handler.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


def drained(running: int, waited: float, limit: float) -> bool:
    """Whether an engine that has drained for some seconds may end: its turns are over and others know, or the limit
    has passed. Pure.
    """
    return waited >= limit or (running == 0 and waited >= HEARD_SECONDS)


def ask(port: int) -> int | None:
    """Asks the guard of this pod's engine to drain; returns its running requests, and None where no engine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        headers = {"authorization": f"Bearer {os.environ.get(CONTROL_KEY, '')}", "content-length": "0"}
        connection.request(*DRAIN, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        return int(json.loads(content)["running"]) if answer.status == 200 else None
    except TimeoutError:  # it is busy
        return 1
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()


def main() -> None:
    port, limit = int(sys.argv[1]), float(sys.argv[2])
    began = time.monotonic()
    while (running := ask(port)) is not None and not drained(running, time.monotonic() - began, limit):
        time.sleep(ASK_SECONDS)


if __name__ == "__main__":
    main()
