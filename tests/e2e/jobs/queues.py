"""Objects of Kueue for tests: queues, jobs in them, and the controller of an admission check."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.e2e.cluster.client import Cluster, Object
from tests.e2e.cluster.commands import CommandFailed, eventually
from tests.e2e.installation import condition, small

from .test_sft import NAME as SFT_NAME
from .test_sft import sft_job

GROUP = "kueue.x-k8s.io"
WORKLOAD, SFT_WORKLOAD = f"workloads.{GROUP}", f"{SFT_NAME}-sftjob"
QUEUE, CLUSTER_QUEUE, FLAVOR, URGENT = "gpus", "all-gpus", "any-node", "urgent"
PODS = 5
"""The pods of one of the jobs: learner, engine, rollout worker, tools and judge."""
CHECK, CHECKED = "nodes", "checked"
"""Names of an admission check, and of the ClusterQueue that has it."""
SELECTOR = {"kubernetes.io/os": "linux"}
LABELS, ANNOTATIONS = {"example.dev/slot": "7"}, {"example.dev/request": "request-1"}
TOLERATION = {"key": "example.dev/reserved", "operator": "Exists", "effect": "NoSchedule"}


def cluster_object(kind: str, name: str, **content: object) -> Object:
    return {"apiVersion": f"{GROUP}/v1beta2", "kind": kind, "metadata": {"name": name}, **content}


def cluster_queue(name: str, pods: int = PODS, **spec: object) -> Object:
    """A ClusterQueue with a quota of pods; that of one job, if no other is named."""
    return queue_of_flavors(name, {FLAVOR: pods}, **spec)


def queue_of_flavors(name: str, pods: Mapping[str, int], **spec: object) -> Object:
    """A ClusterQueue with a quota of pods of each of these flavors."""
    return _queue(name, {flavor: _quotas(pods=number) for flavor, number in pods.items()}, **spec)


def queue_of_cpus(name: str, cpus: str, **spec: object) -> Object:
    """A ClusterQueue with a quota of CPUs: Kueue (0.19.2) leaves `pods` out of the share of the job that preempts."""
    return _queue(name, {FLAVOR: _quotas(cpu=cpus)}, **spec)


def _queue(name: str, quotas: Mapping[str, list[Object]], **spec: object) -> Object:
    flavors = [{"name": flavor, "resources": resources} for flavor, resources in quotas.items()]
    group = {"coveredResources": ["pods", "cpu", "memory"], "flavors": flavors}
    return cluster_object("ClusterQueue", name, spec={"namespaceSelector": {}, "resourceGroups": [group], **spec})


def _quotas(**limits: int | str) -> list[Object]:
    quotas = {"pods": 100, "cpu": 100, "memory": "100Gi", **limits}
    return [{"name": resource, "nominalQuota": quota} for resource, quota in quotas.items()]


def local_queue(name: str, cluster_queue: str) -> Object:
    return cluster_object("LocalQueue", name, spec={"clusterQueue": cluster_queue})


def queues() -> list[Object]:
    """A ClusterQueue with the quota of one job, whose jobs of higher priority preempt, and what belongs to it."""
    return [
        cluster_object("ResourceFlavor", FLAVOR, spec={}),
        cluster_queue(CLUSTER_QUEUE, preemption={"withinClusterQueue": "LowerPriority"}),
        cluster_object("WorkloadPriorityClass", URGENT, value=1000, description=""),
    ]


@contextmanager
def further_objects(cluster: Cluster, *objects: Object) -> Generator[None]:
    """Objects of Kueue's outside namespaces, until the end of the block; no job is in their queues by then."""
    eventually("Kueue's webhooks are reached", lambda: takes(cluster, objects), 60)
    try:
        yield
    finally:
        for item in reversed(objects):
            cluster.delete(f"{item['kind']}.{GROUP}", item["metadata"]["name"])


def takes(cluster: Cluster, objects: Sequence[Object]) -> bool:
    """Whether the cluster takes objects of Kueue's: a service's routes come a moment after its pod is ready."""
    try:
        cluster.apply(objects)
    except CommandFailed as error:
        if "failed calling webhook" not in error.complaint:
            raise
        return False
    return True


def queued(name: str, *, queue: str = QUEUE, priority_class: str = "", **changes: object) -> Object:
    """A small job in a queue."""
    job = small(name, **changes)
    labels = {f"{GROUP}/queue-name": queue, f"{GROUP}/priority-class": priority_class}
    job["metadata"]["labels"] = {key: label for key, label in labels.items() if label}
    return job


def queued_sft(**spec: object) -> Object:
    """An SFTJob in the queue."""
    return {**sft_job(**spec), "metadata": {"name": SFT_NAME, "labels": {f"{GROUP}/queue-name": QUEUE}}}


def pods(cluster: Cluster, job: str, namespace: str) -> list[Object]:
    """The pods of a job whose programs have not ended."""
    listed = cluster.list("pods", namespace, f"app.kubernetes.io/instance={job}")
    return [pod for pod in listed if pod["status"].get("phase") not in {"Succeeded", "Failed"}]


def workload(cluster: Cluster, job: str, namespace: str) -> Object:
    return cluster.get(WORKLOAD, f"{job}-agentrljob", namespace)


def reserves(status: str, reason: str, message: str = "") -> Callable[[Object], bool]:
    """Whether a job's condition QuotaReserved is this one."""

    def holds(job: Object) -> bool:
        quota = condition(job, "QuotaReserved")
        return quota[:2] == (status, reason) and message in quota[2]

    return holds


@dataclass(frozen=True, slots=True)
class CheckController:
    """The controller of the admission check, for the jobs of a namespace."""

    cluster: Cluster

    def answer(self, workload: Object, state: str, message: str, **fields: Any) -> None:
        """Writes the state of the check of a Workload."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        check = {"name": CHECK, "state": state, "message": message, "lastTransitionTime": now, **fields}
        place = workload["metadata"]
        status = {"status": {"admissionChecks": [check]}}
        self.cluster.patch(WORKLOAD, place["name"], status, place["namespace"], subresource="status")

    def reserving(self) -> int:
        """Workloads that hold quota of the queue."""
        reserving: int = self.cluster.get(f"clusterqueue.{GROUP}", CHECKED)["status"]["reservingWorkloads"]
        return reserving


TAINT = "example.dev/reserved"
"""Key of the taint that the node has while `flavors` are there."""
TOLERATIONS = {
    "spot": {"key": TAINT, "operator": "Exists", "effect": "NoSchedule"},
    "on-demand": {"key": TAINT, "operator": "Equal", "value": "jobs", "effect": "NoSchedule"},
}
"""The toleration of the pods of each flavor."""


def label_of(flavor: str) -> str:
    """The label of the nodes of a flavor."""
    return f"example.dev/{flavor}"


@contextmanager
def flavors(cluster: Cluster, queue: str, pods: Mapping[str, int]) -> Generator[None]:
    """A ClusterQueue with a quota of pods of several flavors, all of the cluster's node, which has a label for each and
    a taint that the pods of each tolerate in another way.
    """
    objects = [
        cluster_object("ResourceFlavor", name, spec={"nodeLabels": {label_of(name): "true"}, "tolerations": [entry]})
        for name, entry in TOLERATIONS.items()
    ]
    labels, taint = [label_of(name) for name in TOLERATIONS], f"{TAINT}=jobs:NoSchedule"
    with further_objects(cluster, *objects, queue_of_flavors(queue, pods)):
        cluster.kubectl("label", "nodes", "--all", *(f"{label}=true" for label in labels))
        cluster.kubectl("taint", "nodes", "--all", taint)
        try:
            yield
        finally:
            cluster.kubectl("taint", "nodes", "--all", f"{taint}-")
            cluster.kubectl("label", "nodes", "--all", *(f"{label}-" for label in labels))


def flavors_of(pod: Object) -> list[str]:
    """The flavors whose nodes a pod selects and whose taint it tolerates."""
    tolerations: list[Object] = pod["spec"]["tolerations"]
    selector: Object = pod["spec"].get("nodeSelector") or {}
    return [
        name for name, entry in TOLERATIONS.items() if selector.get(label_of(name)) == "true" and entry in tolerations
    ]


def updates(roles: Sequence[str]) -> list[Object]:
    """What the check adds to pods of these roles."""
    added = {"nodeSelector": SELECTOR, "labels": LABELS, "annotations": ANNOTATIONS, "tolerations": [TOLERATION]}
    return [{"name": role, **added} for role in roles]


def has_updates(pod: Object) -> bool:
    metadata, spec = pod["metadata"], pod["spec"]
    return (
        metadata["labels"].items() >= LABELS.items()
        and metadata.get("annotations", {}).items() >= ANNOTATIONS.items()
        and (spec.get("nodeSelector") or {}).items() >= SELECTOR.items()
        and TOLERATION in spec["tolerations"]
    )
