"""The objects that the watch streams delivered, kept small: jobs in full, the used fields of pods and workloads, names
of the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.job import KIND
from kestrl_operator.state import admission
from kestrl_operator.state.accelerators import Node
from kestrl_operator.state.admission import WorkloadAdmission, admission_of
from kestrl_operator.state.jobs import JobObjects, Key
from kestrl_operator.state.parsing import pod_of, workload_of
from kestrl_operator.state.snapshot import Pod, Workload

Object = Mapping[str, Any]
JOB_LABEL = "kestrl.dev/job"
INSTANCE_LABEL = "app.kubernetes.io/instance"
WORKLOADS = frozenset({"StatefulSet", "Deployment"})
OF_USERS = ("generation", "labels", "annotations", "deletionTimestamp")
"""Metadata of a job that change by what users do."""


class OwnedObject(NamedTuple):
    """A watched object that belongs to a job."""

    kind: str
    name: str


@dataclass(slots=True)
class Dependents:
    """The objects of one job."""

    pods: dict[str, Pod] = field(default_factory=dict[str, Pod])
    """By name."""
    workloads: dict[str, Workload] = field(default_factory=dict[str, Workload])
    """By uid, like the next."""
    children: dict[str, OwnedObject] = field(default_factory=dict[str, OwnedObject])
    admissions: dict[str, WorkloadAdmission] = field(default_factory=dict[str, WorkloadAdmission])
    """By uid."""


NO_DEPENDENTS = Dependents()


class Known(NamedTuple):
    """Uids of all objects in the store."""

    jobs: frozenset[str]
    pods: frozenset[str]
    children: frozenset[str]


def _belongs(pod: Pod, workloads: Collection[str], uid: str) -> bool:
    """Whether a pod belongs to the job with these workloads. ReplicaSets, which own the pods of Deployments, are not
    watched.
    """
    kind, owner = pod.owner
    return owner in workloads or (kind == "ReplicaSet" and pod.job == uid)


class Store(JobObjects):
    """The AgentRLJobs, and the newest known state of each object that belongs to one."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: Sequence[Node] | None = None
        """The nodes as last listed; None where this operator may not list them."""
        self._written: dict[str, Object] = {}
        """The last status that this process wrote, or writes now, by uid of the job."""
        self._dependents: dict[Key, Dependents] = {}
        self._owners: dict[str, str] = {}
        """Uid of the owning job by uid of the child; empty for an orphaned child."""

    def pods(self, key: Key, uid: str) -> list[Pod]:
        """Pods created by workloads of this job. Pods that only carry its labels belong to a deleted job of the name,
        or to somebody else.
        """
        dependents = self._of(key)
        made_by = {child for child in dependents.children if self._owners[child] == uid}
        return [pod for pod in dependents.pods.values() if _belongs(pod, made_by, uid)]

    def workloads(self, key: Key) -> dict[Role, Workload]:
        return {workload.role: workload for workload in self._of(key).workloads.values()}

    def admission(self, key: Key, uid: str) -> WorkloadAdmission | None:
        """The answer to the request for quota of this job; None if it has none."""
        admissions = self._of(key).admissions
        return next((admissions[child] for child in admissions if self._owners[child] == uid), None)

    def scaled_up(self, key: Key) -> list[OwnedObject]:
        """Workloads of a job with more than 0 replicas."""
        dependents = self._of(key)
        return [dependents.children[uid] for uid, workload in dependents.workloads.items() if workload.replicas > 0]

    def children(self, key: Key) -> frozenset[OwnedObject]:
        """The watched objects of a job that exist."""
        return frozenset(self._of(key).children.values())

    def leftovers(self, key: Key, uid: str) -> frozenset[OwnedObject]:
        """The objects that remain of another job of this name."""
        children = self._of(key).children.items()
        return frozenset(child for name, child in children if self._owners[name] not in {"", uid})

    def lost_nodes(self) -> dict[str, str]:
        """Nodes that are not ready, with what Kubernetes says of them."""
        return {node.name: node.lost for node in self.nodes or () if node.lost}

    def on_nodes(self, nodes: Collection[str]) -> Iterator[Key]:
        """The jobs with pods on any of these nodes."""
        for key, dependents in self._dependents.items():
            if any(pod.node in nodes for pod in dependents.pods.values()):
                yield key

    def _of(self, key: Key) -> Dependents:
        return self._dependents.get(key, NO_DEPENDENTS)

    def expect(self, uid: str, status: Object) -> None:
        """Notes a status that this process is about to write."""
        self._written[uid] = status

    def expects(self, body: Object) -> bool:
        """Whether the state of a job is known, or differs from the known one by a status that this process writes: its
        watch event may precede the answer.
        """
        metadata = body["metadata"]
        uid, stored_job = metadata["uid"], self.jobs.get(Key(metadata["namespace"], metadata["name"]))
        if int(metadata["resourceVersion"]) <= self.version(uid):
            return True
        if stored_job is None or stored_job["metadata"]["uid"] != uid or self._written.get(uid) != body.get("status"):
            return False
        return all(stored_job["metadata"].get(name) == metadata.get(name) for name in OF_USERS)

    def drop(self, key: Key, uid: str) -> None:
        self._written.pop(uid, None)
        super().drop(key, uid)

    def pod(self, body: Object, *, deleted: bool = False) -> Key | None:
        """Stores a pod; returns the key of its job."""
        metadata = body["metadata"]
        job = metadata.get("labels", {}).get(JOB_LABEL)
        pod = pod_of(body)
        if job is None or pod is None:
            return None
        key = Key(metadata["namespace"], job)
        if deleted:
            self._versions.delete(body)
            self._forget_pod(key, pod.name, pod.uid)
        elif self._versions.take(body):
            self._dependents.setdefault(key, Dependents()).pods[pod.name] = pod
        return key

    def _forget_pod(self, key: Key, name: str, uid: str) -> None:
        pods = self._of(key).pods
        if name in pods and pods[name].uid == uid:
            del pods[name]
        self._drop_if_empty(key)
        self._versions.forget(uid)

    def _drop_if_empty(self, key: Key) -> None:
        if self._of(key) == NO_DEPENDENTS:
            self._dependents.pop(key, None)

    def child(self, kind: str, body: Object, *, deleted: bool = False) -> Key | None:
        """Stores a workload or another watched object of a job; returns the key of its job."""
        metadata = body["metadata"]
        job = metadata.get("labels", {}).get(INSTANCE_LABEL)
        if job is None:
            return None
        key, uid = Key(metadata["namespace"], job), metadata["uid"]
        if deleted:
            self._versions.delete(body)
            self._forget_child(key, uid)
        elif self._versions.take(body):
            dependents = self._dependents.setdefault(key, Dependents())
            dependents.children[uid] = OwnedObject(kind, metadata["name"])
            owner = next((item["uid"] for item in metadata.get("ownerReferences", ()) if item["kind"] == KIND), "")
            self._owners[uid] = owner
            if kind == admission.KIND:
                dependents.admissions[uid] = admission_of(body)
            workload = workload_of(body) if kind in WORKLOADS else None
            if workload is not None:
                dependents.workloads[uid] = workload
        return key

    def _forget_child(self, key: Key, uid: str) -> None:
        dependents = self._of(key)
        dependents.children.pop(uid, None)
        dependents.workloads.pop(uid, None)
        dependents.admissions.pop(uid, None)
        self._drop_if_empty(key)
        self._owners.pop(uid, None)
        self._versions.forget(uid)

    def known(self) -> Known:
        """Uids of everything in the store: whatever a list requested from now on does not contain was deleted."""
        return Known(
            jobs=frozenset(job["metadata"]["uid"] for job in self.jobs.values()),
            pods=frozenset(pod.uid for dependents in self._dependents.values() for pod in dependents.pods.values()),
            children=frozenset(uid for dependents in self._dependents.values() for uid in dependents.children),
        )

    def forget(self, uids: Collection[str]) -> Iterator[Key]:
        """Removes objects that a list did not contain, by uid; yields the keys of their jobs."""
        yield from self.forget_jobs(uids)
        for key, dependents in list(self._dependents.items()):
            for pod in [pod for pod in dependents.pods.values() if pod.uid in uids]:
                self._forget_pod(key, pod.name, pod.uid)
                yield key
            for uid in [uid for uid in dependents.children if uid in uids]:
                self._forget_child(key, uid)
                yield key
