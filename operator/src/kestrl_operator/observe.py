"""From what the apiserver and the learner told to a typed snapshot of one job. Pure: nothing is asked for here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any

from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure
from kestrl.plan.components import Role
from kestrl.rpc.codec import failure_from_proto, policy_from_proto
from kestrl.spec import AgentRLJob
from kestrl_operator.accelerators import Node

Object = Mapping[str, Any]
ATTEMPTS, RESTARTS, FORGIVEN, RENDERED, ACCEPTED, STORAGE, STATE = (
    f"kestrl.dev/{name}"
    for name in ("attempts", "restarts", "forgiven", "rendered", "accepted", "storage", "learner-state")
)
"""Annotations of the learner's StatefulSet: how often the learner and the whole job were started again, how many attempts count no more,
the digest of what was applied, the newest spec that was, where the run is stored, and what volume its learner got. They are the
operator's only memory: the next leader reads them there."""
UID_LABEL = "kestrl.dev/job-uid"
"""Of pods: the job's uid. Labels with its name alone are those of a former job of the name, too."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
UNSTARTABLE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "InvalidImageName", "RegistryUnavailable",
     "SignatureValidationFailed", "CreateContainerConfigError", "PreCreateHookError", "CreateContainerError",
     "PreStartHookError", "RunContainerError"}
)  # fmt: skip
"""Why a container waits, where waiting alone helps nobody."""
GATES = "schedulingGates"
PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes' own, of a node that is not ready now: they say nothing of what can ever be scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a container's last run ended."""

    container: str
    reason: str
    """Kubernetes' word: Error, OOMKilled, ContainerCannotRun."""
    code: int
    message: str

    def __str__(self) -> str:
        return f"{self.container} ended with {self.reason} ({self.code}){': ' if self.message else ''}{self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod."""

    name: str
    uid: str
    role: Role
    phase: str
    ready: bool
    address: str
    scheduled: bool
    unscheduled: str
    """The scheduler's words while it finds no node."""
    gated: bool
    """Whether a queue holds it back."""
    begun: bool
    """Whether any container of it has ever started."""
    deleting: bool
    made: float
    """When, in seconds since 1970."""
    attempts: int
    """How often the learner had been started again when it was made; told of learners alone."""
    job_restarts: int
    """The same of the whole job, told of every pod."""
    unstartable: str
    """Why a container of it cannot start; empty when it can."""
    ended: tuple[Ended, ...]
    """Containers whose last run ended with a failure."""
    restarts: int
    owner: tuple[str, str] = ("", "")
    """Kind and uid of the workload that made it."""
    job: str = ""
    """The uid of its job, as its template says."""

    @property
    def over(self) -> bool:
        """Whether it has ended for good, which is Kubernetes' own doing, such as an eviction: a workload's pods restart their containers.

        Another is made in its place; it may lie about for long.
        """
        return self.phase in {"Failed", "Succeeded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One StatefulSet or Deployment."""

    role: Role
    replicas: int
    annotations: Mapping[str, str]

    def count(self, annotation: str) -> int:
        return _count(self.annotations.get(annotation, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the learner told last."""

    pod: str
    """The uid of its pod."""
    at: float
    report: pb.WatchProgressResponse
    stepped: float
    """When its step last changed."""
    pace: float
    """Seconds that the longest of its last steps took."""
    gained: int = 0
    """Steps that this pod's learner has done since it was first seen training."""
    connected: bool = True

    @property
    def policy(self) -> PolicyVersion | None:
        """The newest published version."""
        return policy_from_proto(self.report.policy)

    @property
    def proved(self) -> int:
        """Engines that have proved it: each by its own word, and the learner's count does not say otherwise."""
        newest = self.policy
        if newest is None:
            return 0
        by_name = {engine.name for engine in self.report.engines if policy_from_proto(engine.policy) == newest}
        return min(len(by_name), self.report.engines_converged)

    def mean(self, name: str) -> float | None:
        """Of the last episodes, if there is one."""
        return number(self.report.means[name], 4) if name in self.report.means else None

    @property
    def failure(self) -> Failure | None:
        """Why the run failed, if it did."""
        if self.report.phase != "failed":
            return None
        if self.report.HasField("failure"):
            return failure_from_proto(self.report.failure)
        message = self.report.message or "it did not say why"
        return Failure(boundary=Boundary.INFRASTRUCTURE, code="internal", message=message, component="learner-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """When something was first seen by this process; it starts anew when another process leads, which costs a wait at the most."""

    draining: float | None = None
    failed: float | None = None
    """When the learner of this attempt told of its failure."""


NOTHING = Memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is known of a job at a moment."""

    now: float
    name: str
    namespace: str
    uid: str
    generation: int
    job: AgentRLJob | None
    """The job that is in force: of the newest spec, or of the last accepted one with the newest's lifecycle. None: there is none."""
    problem: str = ""
    """Why the newest spec is not in force."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    status: Object = field(default_factory=dict[str, Any])
    """As it stands."""
    pods: Sequence[Pod] = ()
    workloads: Mapping[Role, Workload] = field(default_factory=dict[Role, Workload])
    told: Told | None = None
    silent: str = ""
    """Why the learner does not tell anything now, as the call to it ended."""
    unmade: tuple[float, str] | None = None
    """Since when Kubernetes makes too few pods of a running job, and why: a quota, an admission. None while it makes them."""
    unsatisfiable: str = ""
    """Why no node could ever take the job's pods; empty when one could, or when this operator may not look at nodes."""
    memory: Memory = NOTHING

    @property
    def present(self) -> list[Pod]:
        """Pods that have a place on a node, or want one."""
        return [pod for pod in self.pods if not pod.over]

    @property
    def staying(self) -> list[Pod]:
        """Pods that are not going away."""
        return [pod for pod in self.present if not pod.deleting]

    def of(self, role: Role) -> list[Pod]:
        """A role's pods that are not going away."""
        return [pod for pod in self.staying if pod.role is role]

    @property
    def learner(self) -> Workload | None:
        return self.workloads.get(Role.LEARNER)

    @property
    def queue(self) -> str | None:
        """The queue that its pods wait in, if it names one."""
        return self.labels.get(QUEUE_LABEL)

    @property
    def attempts(self) -> int:
        return 0 if self.learner is None else self.learner.count(ATTEMPTS)

    @property
    def forgiven(self) -> int:
        return 0 if self.learner is None else self.learner.count(FORGIVEN)

    @property
    def counted(self) -> int:
        """Attempts that count against `failurePolicy.backoffLimit`."""
        return max(0, self.attempts - self.forgiven)

    @property
    def restarts(self) -> int:
        return 0 if self.learner is None else self.learner.count(RESTARTS)

    @property
    def speaking(self) -> Told | None:
        """What the learner tells now: of a pod that is there, through a stream that is open."""
        told = self.told
        if told is None or not told.connected or not any(pod.uid == told.pod for pod in self.of(Role.LEARNER)):
            return None
        return told

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition as they stand."""
        for item in self.status.get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"]
        return "Unknown", ""


def number(value: float, digits: int) -> float | None:
    """A number that JSON has; None for one that it has not."""
    return round(value, digits) if isfinite(value) else None


def seconds_of(time: str | None) -> float | None:
    """A time of Kubernetes in seconds since 1970."""
    return None if time is None else datetime.fromisoformat(time).timestamp()


def pod_of(given: Object) -> Pod | None:
    """A pod of a job; None for one that is not of any."""
    metadata, spec, status = given["metadata"], given.get("spec", {}), given.get("status", {})
    role = metadata.get("labels", {}).get("kestrl.dev/role")
    if role not in set(Role):
        return None
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=Role(role),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        address=status.get("podIP", ""),
        scheduled=bool(spec.get("nodeName")),
        unscheduled=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        gated=bool(spec.get(GATES)),
        begun=any(_has_begun(item) for item in statuses),
        deleting="deletionTimestamp" in metadata,
        made=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        attempts=_count(metadata.get("annotations", {}).get(ATTEMPTS, "")),
        job_restarts=_count(metadata.get("annotations", {}).get(RESTARTS, "")),
        unstartable=next(_waiting(statuses), ""),
        ended=tuple(_ended(statuses)),
        restarts=sum(item.get("restartCount", 0) for item in statuses),
        owner=next(
            (_kind_and_uid(item) for item in metadata.get("ownerReferences", ()) if item.get("controller")), ("", "")
        ),
        job=metadata["labels"].get(UID_LABEL, ""),
    )


def _kind_and_uid(reference: Object) -> tuple[str, str]:
    return reference.get("kind", ""), reference.get("uid", "")


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _has_begun(status: Object) -> bool:
    return "waiting" not in status.get("state", {"waiting": {}}) or bool(status.get("lastState"))


def _waiting(statuses: Iterable[Object]) -> Iterator[str]:
    for item in statuses:
        waiting = item.get("state", {}).get("waiting", {})
        if waiting.get("reason") in UNSTARTABLE:
            yield f"{item['name']}: {waiting['reason']}: {waiting.get('message', '')}"


def _ended(statuses: Iterable[Object]) -> Iterator[Ended]:
    """A container that runs well again is not told of: its count of restarts is. One that ends well is, if it does so again and again."""
    for item in statuses:
        state = item.get("state", {})
        last = state.get("terminated") or (
            item.get("lastState", {}).get("terminated") if not item.get("ready") else None
        )
        again = state.get("waiting", {}).get("reason") == "CrashLoopBackOff"
        if last and (last.get("exitCode") or last.get("signal") or again):
            message = last_words(last.get("message", ""))
            yield Ended(
                container=item["name"],
                reason=last.get("reason", "Error"),
                code=last.get("exitCode", 0),
                message=message,
            )


def last_words(text: str) -> str:
    """What a program of ours said when it ended: its last line `error: ...`, else its last line."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    return (told or lines or [""])[-1].removeprefix("error: ")[:500]


def workload_of(given: Object) -> Workload | None:
    """A workload of a job; None for one that is not of any."""
    metadata = given["metadata"]
    role = metadata.get("labels", {}).get("app.kubernetes.io/component")
    if role not in set(Role):
        return None
    return Workload(
        role=Role(role),
        replicas=given.get("spec", {}).get("replicas", 1),
        annotations={
            name: text for name, text in metadata.get("annotations", {}).items() if name.startswith("kestrl.dev/")
        },
    )


def node_of(given: Object) -> Node:
    """A node."""
    metadata, spec = given["metadata"], given.get("spec", {})
    return Node(
        name=metadata["name"],
        labels=metadata.get("labels", {}),
        taints=[item for item in spec.get("taints", ()) if not item.get("key", "").startswith(PASSING_TAINTS)],
        allocatable=given.get("status", {}).get("allocatable", {}),
        schedulable=not spec.get("unschedulable", False),
    )


def is_input(failure: Failure) -> bool:
    """Whether a person has to mend the manifest or what it names."""
    return failure.boundary is Boundary.USER_CODE or failure.code in {"invalid_input", "place_unusable"}
