"""What is known of SFTJobs: the objects that the watch streams delivered, and typed records of their Jobs and pods."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from kestrl._shared.spec.sft import SFT_KIND
from kestrl._shared.spec.status import ResultStatus
from kestrl_operator.state.admission import WorkloadAdmission, admission_of
from kestrl_operator.state.jobs import JobObjects, Key
from kestrl_operator.state.parsing import ended, unstartable
from kestrl_operator.state.snapshot import QUEUE_LABEL, STORAGE, ContainerEnd, seconds_of
from kestrl_operator.state.versions import uid_of

Object = Mapping[str, Any]
NOTHING: Object = {}
Entry = TypeVar("Entry")
SFT_LABEL = "kestrl.dev/sft-job"
"""Label with the name of an SFTJob. Its pods have no `kestrl.dev/job`: an AgentRLJob may have the same name."""
UNPLACED = "kestrl.dev/unplaced"
"""Annotation of a Job that the operator holds for quota: what decides about quota and place in its PodTemplate, without
what Kueue has added. By it another admission may want other nodes, and the request stays what it was."""
CONTAINER = "sft"
"""The container that trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """The Job of an SFTJob."""

    name: str
    uid: str
    version: str
    """Its resourceVersion, for which changes of its status are computed."""
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
    """The queue in which Kueue's own integration of Jobs holds it; empty for none."""
    suspended: bool
    """Whether it may have no pods."""
    stopped: bool
    """Whether Kubernetes has noticed that it is suspended, and creates no pods."""
    resumed: bool
    """Whether it was suspended before: without Kueue no Job ever is."""
    template: Object
    """Its PodTemplate."""
    unplaced: Object | None
    """What its PodTemplate was without the place that its quota is for; None where the operator has never held it for
    quota."""


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
    over: bool
    """Whether it has ended for good."""
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
        self._admissions: dict[str, tuple[Key, str, WorkloadAdmission]] = {}
        """What Kueue has answered, with the uid of the SFTJob, by uid of the Workload."""

    def batch(self, body: Object, *, deleted: bool = False) -> Key | None:
        """Stores a Job; returns the key of its SFTJob."""
        return self._take(self._batches, body, lambda key: (key, body), deleted)

    def batch_of(self, key: Key, uid: str) -> Object | None:
        """The Job that belongs to this SFTJob and not to an earlier one of its name."""
        batches = (body for place, body in self._batches.values() if place == key)
        return next((body for body in batches if owner_uid(body) == uid), None)

    def workload(self, body: Object, *, deleted: bool = False) -> Key | None:
        """Stores a Workload; returns the key of its SFTJob."""
        return self._take(self._admissions, body, lambda key: (key, owner_uid(body), admission_of(body)), deleted)

    def _take(
        self, entries: dict[str, Entry], body: Object, entry: Callable[[Key], Entry], deleted: bool
    ) -> Key | None:
        """Stores or removes an object that belongs to an SFTJob; returns the key of the SFTJob."""
        name = body["metadata"].get("labels", {}).get(SFT_LABEL)
        if name is None:
            return None
        key, uid = Key(body["metadata"]["namespace"], name), uid_of(body)
        if deleted:
            self._versions.delete(body)
            entries.pop(uid, None)
        elif self._versions.take(body):
            entries[uid] = entry(key)
        return key

    def admission(self, key: Key, uid: str) -> WorkloadAdmission | None:
        """The answer to the request for quota of this SFTJob; None if it has none."""
        answers = self._admissions.values()
        return next((answer for place, owner, answer in answers if (place, owner) == (key, uid)), None)

    def known(self) -> frozenset[str]:
        """Uids of everything: whatever a list requested from now on does not contain was deleted."""
        return frozenset(map(uid_of, self.jobs.values())) | frozenset(self._batches) | frozenset(self._admissions)

    def forget(self, uids: Collection[str]) -> Iterator[Key]:
        """Removes objects by uid; yields the keys of their SFTJobs."""
        yield from self.forget_jobs(uids)
        for uid, (key, _) in list(self._batches.items()):
            if uid in uids:
                del self._batches[uid]
                self._versions.forget(uid)
                yield key
        for uid, (key, *_) in list(self._admissions.items()):
            if uid in uids:
                del self._admissions[uid]
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
    suspension = next((item["status"] for item in conditions if item["type"] == "Suspended"), "")
    return BatchJob(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        storage=metadata.get("annotations", {}).get(STORAGE, ""),
        running=bool(status.get("ready")),
        failed=status.get("failed", 0),
        outcome=over.get("type", ""),
        reason=over.get("reason", ""),
        message=over.get("message", ""),
        started=status.get("startTime"),
        finished=status.get("completionTime") or over.get("lastTransitionTime"),
        queue=metadata.get("labels", {}).get(QUEUE_LABEL, ""),
        suspended=body.get("spec", {}).get("suspend", False),
        stopped=suspension == "True",
        resumed=suspension == "False",
        template=body.get("spec", {}).get("template", NOTHING),
        unplaced=_unplaced(metadata.get("annotations", {}).get(UNPLACED, "")),
    )


OVER = frozenset({"Complete", "Failed"})


def _unplaced(text: str) -> Object | None:
    """What a Job remembers; None for anything else, which anybody who may edit the Job may have written."""
    try:
        form: Any = json.loads(text)
    except ValueError:
        return None
    parts = cast("Object", form) if isinstance(form, dict) else NOTHING
    return parts if all(isinstance(parts.get(part), dict) for part in ("metadata", "spec")) else None


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
        over=status.get("phase") in {"Succeeded", "Failed"},
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
