"""The run's storage as the learner uses it: a store that does not answer is asked again for minutes, and what it refuses is reported."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from kestrl.errors import PlaceError, StorageError, StorageUnavailable
from kestrl.storage import ObjectStore

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds between two attempts; the object store's own retries come on top, a second or two where connections are refused."""
DRAIN_SECONDS = 10.0
"""How much longer storage is waited for once the program is to drain."""
Result = TypeVar("Result")


class Patience:
    """How long storage that does not answer is waited for: `seconds` an outage, and less once the program is to end.

    Shared by all threads of the learner.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._hurried = threading.Event()
        self._latest = math.inf

    def hurry(self, seconds: float = 0.0) -> None:
        """From now on nothing is waited for longer than `seconds`."""
        self._latest = min(self._latest, time.monotonic() + seconds)
        self._hurried.set()

    def wait(self, seconds: float, began: float) -> bool:
        """Waits `seconds`, less if the outage that began then has lasted long enough; returns whether to ask again."""
        until = min(time.monotonic() + seconds, self._end(began))
        if not self._hurried.is_set():
            self._hurried.wait(max(0.0, until - time.monotonic()))
        time.sleep(max(0.0, min(until, self._end(began)) - time.monotonic()))
        return time.monotonic() < self._end(began)

    def _end(self, began: float) -> float:
        return min(began + self.seconds, self._latest)


class RunStore(ObjectStore):
    """The run's storage. Waits for a store that does not answer, and writes nothing for a learner that was replaced.

    Args:
        uri: Its address.
        patience: How long an outage is waited for. What is asked later in an outage that lasted too long is asked once.
        refused: Called with what storage refused for good; from any thread.
        waiting: Called with what is waited for, and with an empty text when the wait is over; from any thread.
    """

    def __init__(
        self, uri: str, *, patience: Patience, refused: Callable[[str], None], waiting: Callable[[str], None]
    ) -> None:
        super().__init__(uri)
        self._patience, self._tell_refused, self._tell_waiting = patience, refused, waiting
        self._lock = threading.Lock()
        self._began: float | None = None
        """When the outage began that is going on, by the monotonic clock."""
        self.fence: Callable[[], None] = lambda: None
        """Asked before anything is written or deleted; raises `Superseded` once another learner owns the run."""

    def put(self, path: str, content: bytes, *, create: bool = False) -> None:
        def write() -> None:
            self.fence()  # at every attempt: while storage was away, another learner may have taken the run
            super(RunStore, self).put(path, content, create=create)

        self._patiently(write)

    def delete(self, path: str) -> None:
        def remove() -> None:
            self.fence()
            super(RunStore, self).delete(path)

        self._patiently(remove)

    def view(self, path: str) -> memoryview:
        return self._patiently(lambda: super(RunStore, self).view(path))

    def exists(self, path: str) -> bool:
        return self._patiently(lambda: super(RunStore, self).exists(path))

    def list(self, prefix: str) -> list[str]:
        return self._patiently(lambda: super(RunStore, self).list(prefix))

    def _patiently(self, ask: Callable[[], Result]) -> Result:
        """What the store answers, asked again while it does not.

        Raises:
            StorageUnavailable: It did not answer for as long as it is waited for.
            StorageError, PlaceError: Its answer.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                result = ask()
            except StorageUnavailable as error:
                if not self._patience.wait(pause, self._away(error)):
                    self._given_up(error)
                    raise
                pause = min(2 * pause, LONGEST_PAUSE)
            except (StorageError, PlaceError):
                self._answered()
                raise
            else:
                self._answered()
                return result

    def _away(self, error: StorageUnavailable) -> float:
        """Takes note that the store does not answer; returns when the outage began."""
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                now = datetime.now(UTC)
                since, until = (f"{at:%H:%M:%S}" for at in (now, now + timedelta(seconds=self._patience.seconds)))
                waiting = f"storage does not answer since {since} and is asked again until {until} UTC: {error}"
                log.warning("%s", waiting)
                self._tell_waiting(waiting)
            return self._began

    def _given_up(self, error: StorageUnavailable) -> None:
        self._tell_waiting("")
        self._tell_refused(str(error))

    def _answered(self) -> None:
        with self._lock:
            if self._began is None:
                return
            log.info("storage answers again after %.0f s", time.monotonic() - self._began)
            self._began = None
            self._tell_waiting("")

    def _refused(self, verb: str, path: str, error: Exception) -> PlaceError | StorageError:
        refusal = super()._refused(verb, path, error)
        if not isinstance(refusal, StorageUnavailable):
            self._tell_refused(str(refusal))
        return refusal
