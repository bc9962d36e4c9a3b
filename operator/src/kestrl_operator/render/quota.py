"""The Workload by which a job asks its Kueue queue for quota, and where Kueue wants the job's pods. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.job import JobSpec
from kestrl_operator.render.job import labels as job_labels
from kestrl_operator.render.job import owner
from kestrl_operator.render.pods import account
from kestrl_operator.render.resources import without_model_disk
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import GROUP, JOB_UID_LABEL, KIND, PRIORITY_KIND, REQUEST, VERSION, QuotaRequest
from kestrl_operator.state.cluster import replicas
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.store import WORKLOADS

Object = dict[str, Any]
COUNTED = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "topologySpreadConstraints")
"""Fields of a pod that decide with its containers' resources what quota it needs. Others may change while it holds
quota, when Kueue allows no change of a Workload."""
CONTAINER = ("name", "resources", "restartPolicy")
"""Those of a container."""


def quota_request(spec: JobSpec, objects: Sequence[Object], queue: str, priority_class: str) -> QuotaRequest:
    """What a job needs to run.

    Args:
        spec: The job's spec.
        objects: The job's objects, as rendered for a running job.
        queue: The queue that it names.
        priority_class: The WorkloadPriorityClass that it names; empty for none.
    """
    pod_sets = [_pod_set(spec, item) for item in objects if item["kind"] in WORKLOADS]
    content = json.dumps([queue, pod_sets], sort_keys=True)
    return QuotaRequest(
        queue=queue,
        priority_class=priority_class,
        pod_sets=pod_sets,
        digest=hashlib.sha256(content.encode()).hexdigest()[:32],
    )


def _pod_set(spec: JobSpec, item: Object) -> Object:
    """The pods of a role; of engines with a range, the most that there may be."""
    role = Role(item["metadata"]["labels"]["app.kubernetes.io/component"])
    pods = item["spec"]["template"]["spec"]
    counted: Object = {field: pods[field] for field in COUNTED if pods.get(field)}
    for group in ("initContainers", "containers"):
        if pods.get(group):
            counted[group] = [
                {field: counted_part[field] for field in CONTAINER if counted_part.get(field)}
                for counted_part in map(_without_default_disk, pods[group])
            ]
    count = spec.inference.replicas.max if role is Role.INFERENCE else replicas(spec, {}).get(role, 1)
    return {"name": str(role), "count": count, "template": {"spec": counted}}


def _without_default_disk(container: Object) -> Object:
    """A container without what it requests of its node's disk by default: a queue admits no job that asks for a
    resource of which it has no quota.
    """
    return (
        {**container, "resources": without_model_disk(container["resources"])}
        if "resources" in container
        else container
    )


def workload_object(kind: str, key: Key, uid: str, request: QuotaRequest, priority: int | None) -> Object:
    """The Workload, owned by the job.

    Args:
        kind: Kind of the job.
        key: Namespace and name of the job.
        uid: Uid of the job.
        request: What it asks for.
        priority: The priority of its class; None where it names none.
    """
    spec: Object = {"queueName": request.queue, "podSets": list(request.pod_sets)}
    if priority is not None:
        reference = {"group": GROUP, "kind": PRIORITY_KIND, "name": request.priority_class}
        spec |= {"priorityClassRef": reference, "priority": priority}
    metadata = {
        "name": account(key.name),
        "namespace": key.namespace,
        "labels": {**job_labels(key.name), JOB_UID_LABEL: uid},
        "annotations": {REQUEST: request.digest},
        "ownerReferences": [owner(kind, key.name, uid)],
    }
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}


def merged(placements: Sequence[Placement]) -> Placement:
    """The place that fits all of these."""
    selector, labels, annotations = dict[str, str](), dict[str, str](), dict[str, str]()
    tolerations: list[Mapping[str, Any]] = []
    for placement in placements:
        selector |= placement.node_selector
        labels |= placement.labels
        annotations |= placement.annotations
        tolerations += [toleration for toleration in placement.tolerations if toleration not in tolerations]
    return Placement(selector, tolerations, labels, annotations)
