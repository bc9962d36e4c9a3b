"""What a job asks its Kueue queue for, and what Kueue has answered. Pure.

The request is one Workload with a pod set for each role, so that Kueue admits the whole job or nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.jobs import Key

Object = Mapping[str, Any]
GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
KIND, PRIORITY_KIND = "Workload", "WorkloadPriorityClass"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Label of a Workload with its job's uid, by which Kueue names the job in what it writes of a preemption."""
REQUEST = "kestrl.dev/quota-request"
"""Annotation of a Workload: the digest of what it asks for."""
ADMITTED, EVICTED, FINISHED, PODS_READY, QUOTA_RESERVED, REQUEUED = (
    "Admitted",
    "Evicted",
    "Finished",
    "PodsReady",
    "QuotaReserved",
    "Requeued",
)
"""Conditions of a Workload."""
NOTHING: Object = {}
REQUEUES = frozenset({"Preempted", "NodeFailures"})
"""Reasons of an eviction after which the Workload queues again at once."""
DEACTIVATED = "Deactivated"
"""Reason of the eviction of a Workload whose `spec.active` is false; Kueue appends why it set that itself, as in
`DeactivatedDueToAdmissionCheck`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """What a job needs to run."""

    queue: str
    priority_class: str
    """Name of a WorkloadPriorityClass; empty for none."""
    pod_sets: Sequence[Object]
    digest: str
    """Digest of queue and pod sets."""


@dataclass(frozen=True, slots=True)
class CheckState:
    """An admission check of a Workload."""

    name: str
    state: str
    """Pending, Ready, Retry or Rejected."""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.name} is {self.state}{self.message and f': {self.message}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAdmission:
    """A job's Workload, as Kueue has answered it."""

    name: str
    uid: str
    version: str
    """Its resourceVersion, for which changes of its status are computed."""
    request: str
    """Digest of what it asks for."""
    priority_class: str = ""
    active: bool = True
    """Whether it may be admitted; an administrator deactivates it by `spec.active: false`."""
    deleting: bool = False
    conditions: Sequence[Object] = ()
    cluster_queue: str = ""
    flavors: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """ResourceFlavors by pod set."""
    checks: Sequence[CheckState] = ()
    updates: Mapping[str, Sequence[Placement]] = field(default_factory=dict[str, Sequence[Placement]])
    """What admission checks add, by pod set."""

    def condition(self, kind: str) -> Object:
        """A condition of the Workload; empty if it has none of this type."""
        return next((condition for condition in self.conditions if condition["type"] == kind), NOTHING)

    def has(self, kind: str) -> bool:
        """Whether a condition is true."""
        return self.condition(kind).get("status") == "True"

    @property
    def eviction(self) -> str:
        """Why Kueue takes or took the quota back; empty if it does not."""
        condition = self.condition(EVICTED)
        return f"{condition.get('reason', '')}: {condition.get('message', '')}" if self.has(EVICTED) else ""

    @property
    def unfinished_checks(self) -> Sequence[CheckState]:
        """Admission checks that are not ready."""
        return [check for check in self.checks if check.state != "Ready"]

    @property
    def lets_run(self) -> bool:
        """Whether pods may run: Kueue has admitted it and does not take the quota back."""
        return self.has(ADMITTED) and not self.has(EVICTED) and not self.has(FINISHED) and not self.deleting


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a job asks for, and the answer."""

    request: QuotaRequest | None
    """None where no valid spec is in force, or the job names no queue."""
    admission: WorkloadAdmission | None
    """None where there is no Workload."""
    refused: str = ""
    """Why the Workload could not be written."""

    @property
    def outdated(self) -> bool:
        """Whether the Workload asks for something else than the job needs now."""
        return self.request is not None and self.admission is not None and self.request.digest != self.admission.request

    @property
    def suffices(self) -> bool:
        """Whether the job has the quota that it needs."""
        return self.admission is not None and self.admission.lets_run and not self.outdated


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaHolder:
    """A job of either kind, as far as its Workload names it."""

    kind: str
    key: Key
    uid: str

    @property
    def name(self) -> str:
        """Name of its Workload."""
        return f"{self.key.name}-{self.kind.lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """What a job of either kind does with its quota at one moment."""

    holder: QuotaHolder
    now: float
    queue: str
    """The queue that it names; empty for none."""
    quota: Quota | None
    """None where it asks for nothing and has no Workload, or this operator does not use Kueue."""
    occupied: bool
    """Whether pods of it are there, or may be."""
    ready: bool
    """Whether all of its pods are ready."""
    end: str = ""
    """Reason of its end; empty before."""
    suspended: bool | None = None
    """Whether its spec suspends it; None for a kind that has no such field."""

    @property
    def asks_for_nothing(self) -> bool:
        """Whether it needs no Workload: it names no queue, or is suspended and without pods."""
        return not self.queue or (not self.end and self.suspended is True and not self.occupied)


def absent_priority_class(name: str) -> str:
    """What is said of a job whose label names a WorkloadPriorityClass that does not exist."""
    return (
        f"label {PRIORITY_LABEL}: there is no WorkloadPriorityClass {name!r}; create it, or name one of `kubectl get "
        "workloadpriorityclass`"
    )


def admission_of(body: Object) -> WorkloadAdmission:
    """The typed form of a Workload."""
    metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    granted: Object = status.get("admission") or NOTHING
    checks: Sequence[Object] = status.get("admissionChecks") or ()
    updates: dict[str, list[Placement]] = {}
    for check in checks:
        for update in check.get("podSetUpdates") or ():
            entry = Placement(
                update.get("nodeSelector") or {},
                update.get("tolerations") or (),
                update.get("labels") or {},
                update.get("annotations") or {},
            )
            updates.setdefault(update["name"], []).append(entry)
    return WorkloadAdmission(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        request=metadata.get("annotations", {}).get(REQUEST, ""),
        priority_class=(spec.get("priorityClassRef") or NOTHING).get("name", ""),
        active=spec.get("active", True),
        deleting="deletionTimestamp" in metadata,
        conditions=status.get("conditions") or (),
        cluster_queue=granted.get("clusterQueue", ""),
        flavors={
            assignment["name"]: sorted(set((assignment.get("flavors") or NOTHING).values()))
            for assignment in granted.get("podSetAssignments", ())
        },
        checks=[CheckState(check["name"], check["state"], check.get("message", "")) for check in checks],
        updates=updates,
    )
