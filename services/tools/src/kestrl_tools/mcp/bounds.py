"""A bound on the notifications of an MCP server."""

from __future__ import annotations

import time

BURST, PER_SECOND = 2000, 100
"""Notifications that a server may send at once, and for each second after."""


class Flood:
    """Counts what a server sends without being asked."""

    def __init__(self) -> None:
        self._left, self._at = float(BURST), time.monotonic()

    def rises(self) -> bool:
        """Counts one message; whether there are too many."""
        now = time.monotonic()
        self._left = min(BURST, self._left + PER_SECOND * (now - self._at)) - 1
        self._at = now
        return self._left < 0
