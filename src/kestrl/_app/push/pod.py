"""`python -m kestrl._app.push.pod --settings FILE`: sends a job's run to MLflow, from a pod beside it on a cluster.

A server that does not answer for `OUTAGE_SECONDS`, or refuses, ends it with a failure that the pod's status shows, and
Kubernetes starts it again, later each time. Nothing of the run waits for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.push.cursor import open_cursor
from kestrl._app.push.follower import POLL_SECONDS, WAITING, Follower
from kestrl._app.push.mlflow.connection import MLflowConnection
from kestrl._app.push.mlflow.target import MLflow
from kestrl._app.push.target import PartRefused, PushedRun, TargetUnavailable
from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.settings.tracking import TrackingSettings
from kestrl._shared.processes.hold import ENDING
from kestrl._shared.service import exit_code, settings_path
from kestrl.errors import StorageUnavailable
from kestrl.storage import open_store
from kestrl.terminal import safe_line

OUTAGE_SECONDS = 60.0
"""Seconds without an answer of the server or the storage after which the program ends with the reason."""


def send(settings: TrackingSettings) -> None:
    """Sends what the run stores until SIGTERM or SIGINT, and then the rest.

    Raises:
        TargetUnavailable: The server has not answered for `OUTAGE_SECONDS`, or not at the end.
        TargetRefused: The server refuses what it is sent.
        StorageError: The storage cannot be read.
    """
    place = EpisodePlace(open_store(settings.storage, create=False), None)
    run = PushedRun(id=settings.run, job=settings.job, storage=settings.storage, settings=settings.settings)
    target = MLflow(MLflowConnection(settings.uri, os.environ), settings.experiment, location=settings.uri)
    ready = Path(settings.ready_file)
    ready.unlink(missing_ok=True)
    try:
        with open_cursor(settings.storage, f"{target.key} {settings.sample}") as cursor:
            follower = Follower(place, run, target, cursor, sample=settings.sample, say=_say)
            _follow(follower, ready)
            _send_all(follower, live=False)
    finally:
        target.close()


def _follow(follower: Follower, ready: Path) -> None:
    """Sends what is stored, again and again, until a signal asks for the end."""
    silent_since: float | None = None
    while not _is_ending(POLL_SECONDS):
        try:
            _send_all(follower, live=follower.live)
        except (TargetUnavailable, StorageUnavailable) as error:
            ready.unlink(missing_ok=True)
            now = time.monotonic()
            if silent_since is None:
                silent_since = now
                _say(f"{WAITING}{error}")
            if now - silent_since >= OUTAGE_SECONDS:
                raise
        else:
            silent_since = None
            ready.touch()


def _send_all(follower: Follower, *, live: bool) -> None:
    """Sends all that is stored; raises `PartRefused` once the rest is sent, if something could not be."""
    follower.send_new(live=live)
    problems = follower.sent.problems
    if problems:
        raise PartRefused(f"{len(problems)} parts are not sent, all others are: {problems[0]}")


def _is_ending(seconds: float) -> bool:
    """Whether a signal asks for the end, at once or within a time."""
    return signal.sigtimedwait(ENDING, seconds) is not None


def _say(line: str) -> None:
    print(safe_line(line), flush=True)  # noqa: T201 - the pod's log


def main() -> int:
    """Runs the program; returns its exit code."""
    # A signal waits until it is asked for: what is being sent is sent whole.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    path = settings_path()
    return exit_code(lambda: send(read_settings(TrackingSettings, path)))


if __name__ == "__main__":
    sys.exit(main())
