"""Installations of the operator: each job is reconciled by one of them, which its status names.

An installation is named by its Lease. It takes a job that names none, and one whose installation has not renewed its
Lease for the Lease's duration. The name is written for the job's resourceVersion, so one of several takes it. An
operator that meets another's name publishes events and writes nothing else: both would write one condition in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import LEASE, Kind
from kestrl_operator.apiserver.lease_age import LeaseAge
from kestrl_operator.events import Events, Notice
from kestrl_operator.state.jobs import JobObjects, Key

log = logging.getLogger(__name__)
LOOK_SHARE = 0.2
"""Share of the lease's duration between two looks at another installation's Lease, as between two renewals."""
REMEMBERED = 64
"""Other installations whose Leases are looked at; the least recently looked at is forgotten."""
FIELD = "installation"
FORBIDDEN = 403


class Look(NamedTuple):
    """What the last look at another installation's Lease found."""

    at: float
    alive: bool
    doubt: str = ""
    """Why that is not known; empty if it is."""


class Installations:
    """The installations from the view of one of them."""

    def __init__(self, api: Api, events: Events, *, namespace: str, name: str, seconds: float) -> None:
        """Prepares this installation.

        Args:
            api: Connection to the API server.
            events: Publishes events.
            namespace: Namespace of this installation's Lease.
            name: Name of its Lease.
            seconds: Duration of its Lease.
        """
        self._api, self._events = api, events
        self._name, self._seconds = f"{namespace}/{name}", seconds
        self._ages: OrderedDict[str, LeaseAge] = OrderedDict()
        self._looks: OrderedDict[str, Look] = OrderedDict()
        self._looking = asyncio.Lock()
        self._reported: dict[tuple[Kind, Key], tuple[str, str]] = {}
        """The uid and the other installation of each job that an event was published for."""

    @property
    def recheck_seconds(self) -> float:
        """Seconds until the next pass over a job of another installation."""
        return self._seconds * LOOK_SHARE

    def is_foreign(self, raw: Mapping[str, Any]) -> bool:
        """Whether a job names another installation."""
        return _named(raw) not in {"", self._name}

    def is_mine(self, raw: Mapping[str, Any]) -> bool:
        """Whether a job names this installation, so that its status may be written."""
        return _named(raw) == self._name

    def forget(self, key: Key, kind: Kind) -> None:
        """Forgets a deleted job."""
        self._reported.pop((kind, key), None)

    async def claimed(self, key: Key, raw: Mapping[str, Any], kind: Kind) -> Mapping[str, Any] | None:
        """The job, once it names this installation; None while it is another's, or if it changed meanwhile.

        Raises:
            ApiProblem: The API server does not answer.
        """
        marked = _named(raw)
        if marked == self._name:
            self.forget(key, kind)
            return raw
        look = await self._look(marked)
        if look.alive:
            await self._report(key, raw, kind, look)
            return None
        metadata = raw["metadata"]
        status = {**raw.get("status", {}), FIELD: self._name}
        version = int(metadata["resourceVersion"])
        try:
            updated_job = await self._api.apply_status(key.namespace, key.name, version, status, kind=kind)
        except (Gone, Conflict):
            return None  # deleted, changed, or taken by another installation: its watch event causes another pass
        self.forget(key, kind)
        if marked:
            note = f"installation {self._name} goes on with this job; the Lease of {marked} is not renewed"
            await self._events.announce(key, metadata["uid"], Notice("Normal", "TakenOver", note), kind=kind)
        return updated_job

    async def _report(self, key: Key, raw: Mapping[str, Any], kind: Kind, look: Look) -> None:
        """Publishes an event for a job of another installation, once."""
        marked, uid = _named(raw), raw["metadata"]["uid"]
        if self._reported.get((kind, key)) == (uid, marked):
            return
        self._reported[kind, key] = uid, marked
        note = (
            f"installation {self._name} leaves this job alone: it is reconciled by {marked}, and would be taken over "
            f"once the Lease {marked} is not renewed any more"
        )
        if look.doubt:
            note = (
                f"installation {self._name} leaves this job alone: its status names {marked}, and whether that still "
                f"runs is not known: {look.doubt}"
            )
        await self._events.announce(key, uid, Notice("Warning", "OtherInstallation", note), kind=kind)

    async def _look(self, lease: str) -> Look:
        """Whether another installation renews its Lease; looked up at most once per recheck."""
        namespace, _, name = lease.partition("/")
        now = asyncio.get_running_loop().time()
        if not namespace or not name:
            return Look(now, alive=False)
        async with self._looking:
            look = self._looks.get(lease)
            if look is not None and now > look.at + self._seconds:
                # The API server was away, and no Lease could be renewed either: its age begins anew.
                self._ages.pop(lease, None)
            if look is None or now >= look.at + self.recheck_seconds:
                look = self._looks[lease] = await self._looked(lease, namespace, name)
            self._looks.move_to_end(lease)
            while len(self._looks) > REMEMBERED:
                self._ages.pop(self._looks.popitem(last=False)[0], None)
            return look

    async def _looked(self, lease: str, namespace: str, name: str) -> Look:
        began = asyncio.get_running_loop().time()
        try:
            record = await self._api.get(LEASE, name, namespace)
        except Gone:
            record = {}
        except ApiProblem as error:
            if error.status != FORBIDDEN:
                raise
            log.warning("%s", error)
            return Look(began, alive=True, doubt=str(error))
        # A released Lease counts as renewed, too: a replica of that installation takes it at once.
        return Look(began, self._ages.setdefault(lease, LeaseAge(self._seconds)).is_fresh(record))


class Reconciling(Protocol):
    """A reconciler of one kind of job."""

    async def reconcile(self, key: Key) -> float | None: ...

    async def report_failure(self, key: Key, message: str) -> None: ...

    def leave(self, key: Key) -> None:
        """Stops following a job that another installation reconciles."""
        ...


class ClaimedJobs:
    """A reconciler of those jobs alone that name this installation."""

    def __init__(self, installations: Installations, kind: Kind, jobs: JobObjects, reconciler: Reconciling) -> None:
        self._installations, self._kind = installations, kind
        self._jobs, self._reconciler = jobs, reconciler

    async def reconcile(self, key: Key) -> float | None:
        """Runs one pass; returns the seconds after which another is due without an event.

        Raises:
            ApiProblem: The API server did not do what was asked; the caller retries later.
        """
        raw = self._jobs.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self._installations.forget(key, self._kind)
            return await self._reconciler.reconcile(key)
        claimed = await self._installations.claimed(key, raw, self._kind)
        if claimed is None:
            self._reconciler.leave(key)
            return self._installations.recheck_seconds
        if claimed is not raw:
            self._jobs.job(claimed)
        return await self._reconciler.reconcile(key)

    async def report_failure(self, key: Key, message: str) -> None:
        """Writes into a job's status that a pass over it failed, unless that is another installation's to write.

        Raises:
            ApiProblem: The API server refuses that as well.
        """
        raw = self._jobs.jobs.get(key)
        if raw is not None and self._installations.is_mine(raw):
            await self._reconciler.report_failure(key, message)


def _named(raw: Mapping[str, Any]) -> str:
    """The installation that a job names; empty for none."""
    return raw.get("status", {}).get(FIELD, "")
