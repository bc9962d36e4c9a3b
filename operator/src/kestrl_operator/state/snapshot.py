"""A typed snapshot of one job, from what the API server and the learner reported. Pure: nothing is requested here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.spec import AgentRLJob
from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure, PlaceError, StorageInaccessible, StorageUnavailable, UserInputError
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase
from kestrl_operator.state.admission import Quota

Object = Mapping[str, Any]
MANAGER = "kestrl-operator"
"""The field manager of everything that is applied."""
ATTEMPTS, RESTARTS, FORGIVEN, RENDERED, ACCEPTED, STORAGE, STATE = (
    f"kestrl.dev/{name}"
    for name in ("attempts", "restarts", "forgiven", "rendered", "accepted", "storage", "learner-state")
)
"""Annotations of the learner's StatefulSet: restarts of the learner and of the whole job, restarts that no longer
count, the digest of the applied objects, the newest applied spec, the storage of the run, and the volume of its
learner. They are the only state of the operator: the next leader reads them."""
OUT_OF_MEMORY = "OOMKilled"
"""Kubernetes' reason for a container that the kernel killed for its memory."""
STORAGE_AWAY = frozenset({StorageInaccessible.code, StorageUnavailable.code})
"""Codes of a learner's failures whose cause is storage, outside of the job."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
UID_LABEL = "kestrl.dev/job-uid"
"""Pod label with the job's uid. Labels with the job's name alone also match pods of a deleted job of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """How a container's last run ended."""

    container: str
    reason: str
    """Kubernetes' reason: Error, OOMKilled, ContainerCannotRun."""
    code: int
    message: str
    at: str = field(default="", compare=False)
    """When it ended, as Kubernetes writes it."""
    log: str = field(default="", compare=False)
    """The last lines of its log, as the kubelet has kept them."""
    running: bool = field(default=False, compare=False)
    """Whether the container runs again."""

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
    """The scheduler's message while it finds no node."""
    gated: bool
    """Whether a queue holds it back."""
    begun: bool
    """Whether any of its containers has ever started."""
    deleting: bool
    made: float
    """Creation time in seconds since 1970."""
    attempts: int
    """Restarts of the learner before this pod was created; set on learner pods only."""
    job_restarts: int
    """Restarts of the whole job before this pod was created; set on every pod."""
    unstartable: str
    """Why one of its containers cannot start; empty when all can."""
    ended: tuple[ContainerEnd, ...]
    """Containers whose last run ended with a failure."""
    restarts: int
    owner: tuple[str, str] = ("", "")
    """Kind and uid of the workload that created it."""
    job: str = ""
    """Uid of its job, from the pod template."""
    node: str = ""
    """Name of its node; empty while it has none."""
    ready_since: float = 0.0
    """When it last became ready, or ceased to be, in seconds since 1970; 0 if that is not known."""
    admitted: bool = False
    """Whether a queue controller has marked it as its own."""

    @property
    def over(self) -> bool:
        """Whether it has ended for good, by eviction for example: the containers of a workload's pod are restarted
        otherwise.

        Its workload creates another pod in its place; the ended one may remain for long.
        """
        return self.phase in {"Failed", "Succeeded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One StatefulSet or Deployment."""

    role: Role
    replicas: int
    annotations: Mapping[str, str]
    applied_replicas: bool = False
    """Whether the operator has applied the number, so that it falls back to Kubernetes' default where it applies none
    any more."""

    def count(self, annotation: str) -> int:
        return count_of(self.annotations.get(annotation, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    """The latest report of the learner."""

    pod: str
    """Uid of the learner's pod."""
    at: float
    state: RunState
    """The run as the learner reported it."""
    stepped: float
    """When its step last changed."""
    pace: float
    """Seconds that the longest of its last steps took."""
    gained: int = 0
    """Steps that the learner has done in this pod since it was first seen training."""
    connected: bool = True

    @property
    def policy(self) -> PolicyVersion | None:
        """The newest published version."""
        return self.state.policy.version

    @property
    def phase(self) -> RunPhase | None:
        """Phase of the run; None if it is unknown to this version."""
        return self.state.activity.phase

    @property
    def over(self) -> bool:
        """Whether the learner has ended its run."""
        return self.phase is not None and self.phase.final

    @property
    def verified(self) -> int:
        """Engines that have verified it: the engines listed with that version, at most as many as the learner
        counts.
        """
        policy = self.policy
        if policy is None:
            return 0
        by_name = {engine.name for engine in self.state.engines.reports if engine.policy == policy}
        return min(len(by_name), self.state.engines.verified)

    def mean(self, name: str) -> float | None:
        """A mean over the last episodes; None if there is none."""
        return number(self.state.means[name], 4) if name in self.state.means else None

    @property
    def failure(self) -> Failure | None:
        """Why the run failed; None if it did not."""
        if self.phase is not RunPhase.FAILED:
            return None
        if self.state.activity.failure is not None:
            return self.state.activity.failure
        message = self.state.activity.message or "no reason was reported"
        return Failure(boundary=Boundary.INFRASTRUCTURE, code="internal", message=message, component="learner-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A time without pods of a job that held some and could not start."""

    generation: int
    """Generation of the spec, of which another ends it."""
    since: float
    """When the first such time began, in seconds since 1970."""
    until: float
    times: int
    """Number of such times since the job last trained."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """When something was first seen by this process. All but a rest is lost when another process becomes the leader,
    which costs a longer wait at most.
    """

    draining: float | None = None
    failed: float | None = None
    """When the learner of this attempt reported its failure."""
    refused: float | None = None
    """Since when the learner has waited for a tool's credential."""
    rest: Rest | None = None
    """The present or last time without pods; None once the job has trained a step since."""


NOTHING = Memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything known about a job at one moment."""

    now: float
    name: str
    namespace: str
    uid: str
    generation: int
    job: AgentRLJob | None
    """The job that is in force: the newest spec, or the last accepted one with the newest lifecycle fields. None if
    there is neither."""
    problem: str = ""
    """Why the newest spec is not in force."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    status: Object = field(default_factory=dict[str, Any])
    """The current status of the job."""
    pods: Sequence[Pod] = ()
    followers: Sequence[Pod] = ()
    """Pods that send the run to an experiment tracker. The job needs none of them: no decision about it looks at
    them."""
    workloads: Mapping[Role, Workload] = field(default_factory=dict[Role, Workload])
    last_report: LearnerReport | None = None
    unreachable: str = ""
    """Why the learner reports nothing now: the error of the last call."""
    not_created: tuple[float, str] | None = None
    """Since when too few pods of a running job have been created, and why, such as a quota or an admission webhook.
    None while enough are created."""
    unsatisfiable: str = ""
    """Why no node could ever run the job's pods; empty when one could, or when this operator may not list nodes."""
    lost_nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Nodes of the job's pods that are not ready, with what Kubernetes says of them; empty where this operator may not
    list nodes."""
    yields: bool = False
    """Whether it is the youngest of the jobs of which some pods have nodes and others find none."""
    memory: Memory = NOTHING
    quota: Quota | None = None
    """What the job asks Kueue for, and the answer. None where it names no queue, or this operator does not use
    Kueue."""

    @property
    def present(self) -> list[Pod]:
        """Pods that occupy a place on a node, or wait for one."""
        return [pod for pod in self.pods if not pod.over]

    @property
    def staying(self) -> list[Pod]:
        """Pods that are not being deleted."""
        return [pod for pod in self.present if not pod.deleting]

    def of(self, role: Role) -> list[Pod]:
        """Pods of a role that are not being deleted."""
        return [pod for pod in self.staying if pod.role is role]

    @property
    def learner(self) -> Workload | None:
        return self.workloads.get(Role.LEARNER)

    @property
    def queue(self) -> str | None:
        """The queue that its pods wait in, if it names one."""
        return self.labels.get(QUEUE_LABEL)

    @property
    def awaits_quota(self) -> bool:
        """Whether the job may not run, since its queue has not admitted it or takes the quota back."""
        return self.queue is not None and self.quota is not None and not self.quota.suffices

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
    def live_report(self) -> LearnerReport | None:
        """The learner's report, if it is current: from a pod that exists, through a stream that is open."""
        report = self.last_report
        # By uid: the pod that replaces it has the same name.
        if report is None or not report.connected or not any(pod.uid == report.pod for pod in self.of(Role.LEARNER)):
            return None
        return report

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of the current status."""
        for item in self.status.get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"]
        return "Unknown", ""


def number(value: float, digits: int) -> float | None:
    """The rounded number; None if it is not finite, which JSON cannot express."""
    return round(value, digits) if isfinite(value) else None


def seconds_of(time: str | None) -> float | None:
    """A Kubernetes timestamp in seconds since 1970."""
    return None if time is None else datetime.fromisoformat(time).timestamp()


def count_of(text: str) -> int:
    """The number in an annotation; 0 for anything else."""
    # Anybody who may edit the object may write it, and a decision must not fail by what they wrote.
    return int(text) if text.isdecimal() and len(text) < 10 else 0


INPUT = frozenset({UserInputError.code, PlaceError.code, StorageInaccessible.code})


def is_input(failure: Failure) -> bool:
    """Whether the user has to fix the manifest or something that it names."""
    return failure.boundary is Boundary.USER_CODE or failure.code in INPUT
