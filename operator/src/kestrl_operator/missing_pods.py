"""Running jobs with too few pods: the cause, which Kubernetes' controllers report only in events, and when to apply all
objects again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kestrl_operator.api import OLD_EVENT, Api
from kestrl_operator.cluster import replicas, workload
from kestrl_operator.lifecycle import short_of_pods_since
from kestrl_operator.render.job import ROLES
from kestrl_operator.snapshot import Snapshot
from kestrl_operator.store import Key

EVENT_LOOKUP_SECONDS = 15.0
"""Seconds between two lookups of the events of a job with too few pods. Pods are normally created sooner."""
REAPPLY_SECONDS = 60.0
"""Seconds after which pods that do not start cause all objects to be applied again, since an object that is not watched
may be missing. The interval doubles."""


class Shortage(NamedTuple):
    """A running job with too few pods."""

    since: float
    looked_up: float
    cause: str
    """The cause, as reported by the latest event; empty if no event reports one."""


class MissingPods:
    """The jobs with too few pods."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._shortages: dict[Key, Shortage] = {}
        self._reapplied_at: dict[Key, float] = {}
        """When all objects of a job were last applied again."""

    def forget(self, key: Key) -> None:
        self._shortages.pop(key, None)
        self._reapplied_at.pop(key, None)

    async def not_created(self, key: Key, snapshot: Snapshot) -> tuple[float, str] | None:
        """Since when pods of a running job have not even been created, and why; None if they have been, or if the cause
        is unknown.

        Raises:
            ApiProblem: The API server does not list the events.
        """
        running = snapshot.job is not None and any(item.replicas for item in snapshot.workloads.values())
        if snapshot.job is None or not running or len(snapshot.staying) >= sum(replicas(snapshot.job.spec).values()):
            self._shortages.pop(key, None)
            return None
        shortage = self._shortages.setdefault(key, Shortage(snapshot.now, snapshot.now, ""))
        if snapshot.now >= shortage.looked_up + EVENT_LOOKUP_SECONDS:
            shortage = self._shortages[key] = Shortage(shortage.since, snapshot.now, await self._why(key))
        return (shortage.since, shortage.cause) if shortage.cause else None

    async def _why(self, key: Key) -> str:
        cause = ""
        names = tuple(workload(key.name, role) for role in ROLES)
        async for item in self._api.list(OLD_EVENT, key.namespace, fields={"reason": "FailedCreate"}):
            if item["involvedObject"].get("name", "").startswith(names):
                cause = f"{item['involvedObject']['name']}: {item.get('message', '')}"
        return cause

    def seconds_until_reapply(self, key: Key, snapshot: Snapshot) -> float | None:
        """Seconds until all objects are to be applied again because pods do not start; None if pods start."""
        since = short_of_pods_since(snapshot)
        if since is None:
            self._reapplied_at.pop(key, None)
            return None
        last = max(since, self._reapplied_at.get(key, since))
        return max(0.0, last + max(REAPPLY_SECONDS, last - since) - snapshot.now)

    def reapplied(self, key: Key, snapshot: Snapshot) -> None:
        """Records that all objects are being applied again now."""
        self._reapplied_at[key] = snapshot.now

    def waits(self, key: Key, snapshot: Snapshot) -> Iterator[float]:
        """Seconds after which another pass is due without an event."""
        if key in self._shortages:
            yield EVENT_LOOKUP_SECONDS
        reapplied = self.seconds_until_reapply(key, snapshot)
        if reapplied is not None:
            yield reapplied
