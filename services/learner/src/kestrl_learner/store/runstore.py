"""The run's storage: retries for minutes while the store does not answer or, having worked, denies access, and reports
what it refuses.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from kestrl._shared.backoff import Backoff
from kestrl.errors import PlaceError, StorageError, StorageInaccessible, StorageUnavailable
from kestrl.storage import ObjectStore

log = logging.getLogger(__name__)
BACKOFF = Backoff(0.5, 5.0)
"""Pauses between attempts, in addition to the object store's own retries."""
DRAIN_SECONDS = 10.0
"""Longest time to wait for storage once the program drains."""
Result = TypeVar("Result")


class Patience:
    """Bound on waiting for storage that cannot be used: `seconds` per outage, less once the program ends.

    Shared by all threads of the learner.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._hurried = threading.Event()
        self._latest = math.inf

    def hurry(self, seconds: float = 0.0) -> None:
        """Bounds all waiting from now on by `seconds`."""
        self._latest = min(self._latest, time.monotonic() + seconds)
        self._hurried.set()

    def wait(self, seconds: float, began: float) -> bool:
        """Waits `seconds`, or less if the outage that began at `began` reaches its bound; returns whether to retry."""
        until = min(time.monotonic() + seconds, self._end(began))
        if not self._hurried.is_set():
            self._hurried.wait(max(0.0, until - time.monotonic()))
        time.sleep(max(0.0, min(until, self._end(began)) - time.monotonic()))
        return time.monotonic() < self._end(began)

    def _end(self, began: float) -> float:
        return min(began + self.seconds, self._latest)


class Fence:
    """Whether this learner may still write: it may until the run's ledger is open, and from then on the ledger says."""

    def __init__(self) -> None:
        self._check: Callable[[], None] | None = None

    def follow(self, check: Callable[[], None]) -> None:
        """Has `check` decide on each write and deletion from now on, from any thread.

        Args:
            check: Raises `Superseded` once another learner owns the run.
        """
        self._check = check

    def check(self) -> None:
        """Returns if this learner may write.

        Raises:
            Superseded: Another learner owns the run.
        """
        if self._check is not None:
            self._check()


class RunStore(ObjectStore):
    """The run's storage. Retries while the store does not answer, and while it denies what it has allowed before: its
    credentials are being rotated. A replaced learner cannot write.

    Args:
        uri: Address of the storage.
        patience: Bound on the retries of an outage. Beyond it, each operation is attempted once.
        refused: Called with a failure that is not retried; from any thread.
        waiting: Called with the reason of a wait, and with an empty text at its end; from any thread.
    """

    def __init__(
        self, uri: str, *, patience: Patience, refused: Callable[[str], None], waiting: Callable[[str], None]
    ) -> None:
        super().__init__(uri)
        self._patience, self._on_refused, self._on_waiting = patience, refused, waiting
        self._lock = threading.Lock()
        self._began: float | None = None
        """Beginning of the present outage by the monotonic clock."""
        self._has_worked = False
        """Whether the store has ever done what was asked. Before, a denial is an error of the user's."""
        self.fence = Fence()
        """Asked before each write and deletion."""

    def put(self, path: str, content: bytes, *, create: bool = False) -> None:
        def write() -> None:
            self.fence.check()  # at every attempt: another learner may have taken over the run during the outage
            super(RunStore, self).put(path, content, create=create)

        self._retried(write)

    def delete(self, path: str) -> None:
        def remove() -> None:
            self.fence.check()
            super(RunStore, self).delete(path)

        self._retried(remove)

    def view(self, path: str) -> memoryview:
        return self._retried(lambda: super(RunStore, self).view(path))

    def exists(self, path: str) -> bool:
        return self._retried(lambda: super(RunStore, self).exists(path))

    def list(self, prefix: str) -> list[str]:
        return self._retried(lambda: super(RunStore, self).list(prefix))

    def _retried(self, ask: Callable[[], Result]) -> Result:
        """Retries an operation while the store cannot be used, for a reason outside of the run.

        Raises:
            StorageUnavailable: It did not answer within the bound.
            StorageInaccessible: It denied access for as long, or has never allowed it.
            StorageError, PlaceError: The store refused.
        """
        failures = 0
        while True:
            try:
                result = ask()
            except (StorageError, PlaceError) as error:
                if not self._may_heal(error):
                    self._answered()
                    raise
                failures += 1
                if not self._patience.wait(BACKOFF.pause(failures), self._away(error)):
                    self._given_up(error)
                    raise
            else:
                self._has_worked = True
                self._answered()
                return result

    def _may_heal(self, error: PlaceError | StorageError) -> bool:
        """Whether a failure passes without a change of the job."""
        return isinstance(error, StorageUnavailable) or (self._has_worked and isinstance(error, StorageInaccessible))

    def _away(self, error: PlaceError | StorageError) -> float:
        """Records that the store cannot be used; returns the beginning of the outage."""
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                now = datetime.now(UTC)
                since, until = (f"{at:%H:%M:%S}" for at in (now, now + timedelta(seconds=self._patience.seconds)))
                symptom = "denies access" if isinstance(error, StorageInaccessible) else "does not answer"
                waiting = f"storage {symptom} since {since} and is asked again until {until} UTC: {error}"
                log.warning("%s", waiting)
                self._on_waiting(waiting)
            return self._began

    def _given_up(self, error: PlaceError | StorageError) -> None:
        self._on_waiting("")
        self._on_refused(str(error))

    def _answered(self) -> None:
        with self._lock:
            if self._began is None:
                return
            log.info("storage can be used again after %.0f s", time.monotonic() - self._began)
            self._began = None
            self._on_waiting("")

    def _refused(self, verb: str, path: str, error: Exception) -> PlaceError | StorageError:
        refusal = super()._refused(verb, path, error)
        if not self._may_heal(refusal):
            self._on_refused(str(refusal))
        return refusal
