"""How long ago a Lease was written, by the local clock: the clocks of two machines are never compared."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class LeaseAge:
    """The age of one Lease's record, measured from when this process saw it change."""

    def __init__(self, seconds: float) -> None:
        """Prepares the measurement.

        Args:
            seconds: Duration of a lease whose record names none.
        """
        self._seconds = seconds
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0

    def is_fresh(self, record: Mapping[str, Any]) -> bool:
        """Whether the record changed less than its duration ago, its first sight included.

        Args:
            record: The Lease; an empty one where there is none.
        """
        spec = record.get("spec", {})
        mark = spec.get("holderIdentity") or "", str(record.get("metadata", {}).get("resourceVersion", ""))
        now = asyncio.get_running_loop().time()
        if mark != self._seen:
            self._seen, self._seen_at = mark, now
        return now < self._seen_at + float(spec.get("leaseDurationSeconds") or self._seconds)
