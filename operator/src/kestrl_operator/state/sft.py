"""What is known of SFTJobs: the objects that the watch streams delivered, and typed records of their Jobs and pods."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kestrl._shared.spec.sft import SFT_KIND
from kestrl._shared.spec.status import ResultStatus
from kestrl_operator.state.admission import PRIORITY_LABEL
from kestrl_operator.state.jobs import JobObjects, Key
from kestrl_operator.state.parsing import ended, unstartable
from kestrl_operator.state.snapshot import QUEUE_LABEL, STORAGE, ContainerEnd, seconds_of
from kestrl_operator.state.versions import uid_of

Object = Mapping[str, Any]
NOTHING: Object = {}
SFT_LABEL = "kestrl.dev/sft-job"
"""Label with the name of an SFTJob. Its pods have no `kestrl.dev/job`: an AgentRLJob may have the same name."""
CONTAINER = "sft"
"""The container that trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """The Job of an SFTJob."""

    uid: str
    storage: str
    """Storage of the runs when the Job was created."""
    running: bool
    """Whether its pod is ready."""
    failed: int
    """Pods that have failed and count."""
    outcome: str
    """Type of the condition with which it ended, Complete or Failed; empty before."""
    reason: str
    message: str
    started: str | None
    finished: str | None
    queue: str
    """Kueue's queue that it was created for; empty for none."""
    priority_class: str
    """Name of its WorkloadPriorityClass; empty for none."""
    suspended: bool
    """Whether it may have no pods, as Kueue has it until it is admitted."""
    resumed: bool
    """Whether it was suspended before: without Kueue no Job ever is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTPod:
    """A pod of an SFTJob."""

    name: str
    made: float
    """Creation time in seconds since 1970."""
    scheduled: bool
    unscheduled: str
    """The scheduler's message while it finds no node."""
    unstartable: str
    """Why one of its containers cannot start; empty when all can."""
    running: bool
    """Whether the program runs."""
    ended: tuple[ContainerEnd, ...]
    """Containers that ended with a failure."""
    result: ResultStatus | None
    """What the program wrote at its end."""


class SFTStore(JobObjects):
    """The SFTJobs and their Jobs."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[str, tuple[Key, Object]] = {}
        """Jobs by uid."""

    def batch(self, body: Object, *, deleted: bool = False) -> Key | None:
        """Stores a Job; returns the key of its SFTJob."""
        name = body["metadata"].get("labels", {}).get(SFT_LABEL)
        if name is None:
            return None
        key, uid = Key(body["metadata"]["namespace"], name), uid_of(body)
        if deleted:
            self._versions.delete(body)
            self._batches.pop(uid, None)
        elif self._versions.take(body):
            self._batches[uid] = (key, body)
        return key

    def batch_of(self, key: Key, uid: str) -> Object | None:
        """The Job that belongs to this SFTJob and not to an earlier one of its name."""
        batches = (body for place, body in self._batches.values() if place == key)
        return next((body for body in batches if owner_uid(body) == uid), None)

    def known(self) -> frozenset[str]:
        """Uids of everything: whatever a list requested from now on does not contain was deleted."""
        return frozenset(map(uid_of, self.jobs.values())) | frozenset(self._batches)

    def forget(self, uids: Collection[str]) -> Iterator[Key]:
        """Removes objects by uid; yields the keys of their SFTJobs."""
        yield from self.forget_jobs(uids)
        for uid, (key, _) in list(self._batches.items()):
            if uid in uids:
                del self._batches[uid]
                self._versions.forget(uid)
                yield key


def owner_uid(body: Object) -> str:
    """Uid of the SFTJob that owns an object; empty without one."""
    owners = body["metadata"].get("ownerReferences", ())
    return next((item["uid"] for item in owners if item["kind"] == SFT_KIND), "")


def batch_of(body: Object) -> BatchJob:
    """The typed form of a Job."""
    metadata, status = body["metadata"], body.get("status", {})
    conditions: Sequence[Object] = status.get("conditions", ())
    over = next((item for item in conditions if item["type"] in OVER and item["status"] == "True"), NOTHING)
    labels: Mapping[str, str] = metadata.get("labels", {})
    return BatchJob(
        uid=metadata["uid"],
        storage=metadata.get("annotations", {}).get(STORAGE, ""),
        running=bool(status.get("ready")),
        failed=status.get("failed", 0),
        outcome=over.get("type", ""),
        reason=over.get("reason", ""),
        message=over.get("message", ""),
        started=status.get("startTime"),
        finished=status.get("completionTime") or over.get("lastTransitionTime"),
        queue=labels.get(QUEUE_LABEL, ""),
        priority_class=labels.get(PRIORITY_LABEL, ""),
        suspended=body.get("spec", {}).get("suspend", False),
        resumed=any(item["type"] == "Suspended" and item["status"] == "False" for item in conditions),
    )


OVER = frozenset({"Complete", "Failed"})


def sft_pod_of(body: Object) -> SFTPod:
    """The typed form of a pod."""
    metadata, status = body["metadata"], body.get("status", {})
    conditions: Sequence[Object] = status.get("conditions", ())
    containers: Sequence[Object] = status.get("containerStatuses", ())
    scheduled = next((item for item in conditions if item["type"] == "PodScheduled"), NOTHING)
    statuses = [*status.get("initContainerStatuses", ()), *containers]
    container_state: Object = next(
        (item.get("state", NOTHING) for item in containers if item["name"] == CONTAINER), NOTHING
    )
    return SFTPod(
        name=metadata["name"],
        made=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        scheduled=bool(body.get("spec", {}).get("nodeName")),
        unscheduled=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        unstartable=next(unstartable(statuses), ""),
        running="running" in container_state,
        ended=tuple(ended(statuses)),
        result=_result(container_state.get("terminated", NOTHING)),
    )


def _result(terminated: Object) -> ResultStatus | None:
    """The adapter that a program reported in its last message; None if it reported none."""
    if terminated.get("exitCode") != 0:
        return None
    try:
        return ResultStatus.model_validate_json(terminated.get("message", ""))
    except ValidationError:
        return None
