"""Running jobs with too few pods: the cause, which Kubernetes' controllers report only in events, and when to apply all
objects again.
"""

from __future__ import annotations

from collections.abc import Iterator

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import OLD_EVENT
from kestrl_operator.controllers.job_state import JobState, Shortage
from kestrl_operator.render.network import ROLES
from kestrl_operator.state.cluster import replicas, workload
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Snapshot
from kestrl_operator.status.lifecycle import short_of_pods_since

EVENT_LOOKUP_SECONDS = 15.0
"""Seconds between two lookups of the events of a job with too few pods. Pods are normally created sooner."""
REAPPLY_SECONDS = 60.0
"""Seconds after which pods that do not start cause all objects to be applied again, since an object that is not watched
may be missing. The interval doubles."""


class MissingPods:
    """Looks up why pods are missing."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def not_created(self, state: JobState, snapshot: Snapshot) -> tuple[float, str] | None:
        """Since when pods of a running job have not even been created, and why; None if they have been, or if the cause
        is unknown.

        Raises:
            ApiProblem: The API server does not list the events.
        """
        running = snapshot.job is not None and any(item.replicas for item in snapshot.workloads.values())
        desired_pods = 0 if snapshot.job is None else sum(replicas(snapshot.job.spec, snapshot.workloads).values())
        if not running or len(snapshot.staying) >= desired_pods:
            state.shortage = None
            return None
        shortage = state.shortage or Shortage(snapshot.now, snapshot.now, "")
        if snapshot.now >= shortage.looked_up + EVENT_LOOKUP_SECONDS:
            shortage = Shortage(shortage.since, snapshot.now, await self._why(state.key))
        state.shortage = shortage
        return (shortage.since, shortage.cause) if shortage.cause else None

    async def _why(self, key: Key) -> str:
        cause = ""
        names = tuple(workload(key.name, role) for role in ROLES)
        async for item in self._api.list(OLD_EVENT, key.namespace, fields={"reason": "FailedCreate"}):
            if item["involvedObject"].get("name", "").startswith(names):
                cause = f"{item['involvedObject']['name']}: {item.get('message', '')}"
        return cause


def seconds_until_reapply(state: JobState, snapshot: Snapshot) -> float | None:
    """Seconds until all objects are to be applied again because pods do not start; None if pods start."""
    since = short_of_pods_since(snapshot)
    if since is None:
        state.reapplied_at = None
        return None
    last = max(since, since if state.reapplied_at is None else state.reapplied_at)
    return max(0.0, last + max(REAPPLY_SECONDS, last - since) - snapshot.now)


def reapply_if_due(state: JobState, snapshot: Snapshot) -> None:
    """Marks the job as drifted when all objects are to be applied again because pods do not start."""
    if seconds_until_reapply(state, snapshot) == 0:
        state.reapplied_at = snapshot.now
        state.drifted = True


def waits(state: JobState, snapshot: Snapshot) -> Iterator[float]:
    """Seconds after which another pass is due without an event."""
    if state.shortage is not None:
        yield EVENT_LOOKUP_SECONDS
    reapplied = seconds_until_reapply(state, snapshot)
    if reapplied is not None:
        yield reapplied
