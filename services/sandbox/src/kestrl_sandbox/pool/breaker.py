"""A circuit breaker: after failures in a row, attempts fail at once for a while."""

from __future__ import annotations

import time

from kestrl_sandbox.contract import SandboxFailure

FAILURES = 3
OPEN_SECONDS = 10.0


class Breaker:
    """Opens after `FAILURES` in a row; after `OPEN_SECONDS` one attempt is let through."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def check(self) -> None:
        """Refuses an attempt while the breaker is open.

        Raises:
            SandboxFailure: It is.
        """
        remaining = self._until - time.monotonic()
        if remaining > 0:
            raise SandboxFailure(
                f"{self._failures} sandboxes in a row did not start; the next attempt is made in {remaining:.0f} s",
                code="sandbox_unavailable",
            )

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = time.monotonic() + OPEN_SECONDS

    def succeeded(self) -> None:
        self._failures = 0
