"""The Workload by which a job asks its Kueue queue for quota, and where Kueue wants the job's pods. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.sft import SFT_KIND
from kestrl_operator.render.job import labels, owner
from kestrl_operator.render.pod_defaults import with_placement
from kestrl_operator.render.resources import without_model_disk
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import (
    GROUP,
    JOB_UID_LABEL,
    KIND,
    PRIORITY_KIND,
    REQUEST,
    VERSION,
    QuotaHolder,
    QuotaRequest,
)
from kestrl_operator.state.cluster import replicas
from kestrl_operator.state.sft import SFT_LABEL, UNPLACED
from kestrl_operator.state.store import WORKLOADS

Object = dict[str, Any]
COUNTED = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "topologySpreadConstraints")
"""Fields of a pod that decide with its containers' resources what quota it needs. Others may change while it holds
quota, when Kueue allows no change of a Workload."""
MARKS = ("labels", "annotations")
"""Fields of a PodTemplate's metadata that a place adds to."""
OF_KUBERNETES = ("batch.kubernetes.io/", "controller-uid", "job-name")
"""Beginnings of the labels that Kubernetes adds to the PodTemplate of a Job, by which the Job finds its pods."""
SFT_POD_SET = "sft"
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
    return request_of([_pod_set(spec, item) for item in objects if item["kind"] in WORKLOADS], queue, priority_class)


def request_of(pod_sets: Sequence[Object], queue: str, priority_class: str) -> QuotaRequest:
    """The request for these pods."""
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
    count = spec.inference.replicas.max if role is Role.INFERENCE else replicas(spec, {}).get(role, 1)
    return {"name": str(role), "count": count, "template": {"spec": counted(item["spec"]["template"]["spec"])}}


def counted(pods: Mapping[str, Any]) -> Object:
    """What of the spec of pods decides about quota."""
    fields: Object = {field: pods[field] for field in COUNTED if pods.get(field)}
    for group in ("initContainers", "containers"):
        if pods.get(group):
            fields[group] = [
                {field: counted_part[field] for field in CONTAINER if counted_part.get(field)}
                for counted_part in map(_without_default_disk, pods[group])
            ]
    return fields


def _without_default_disk(container: Object) -> Object:
    """A container without what it requests of its node's disk by default: a queue admits no job that asks for a
    resource of which it has no quota.
    """
    return (
        {**container, "resources": without_model_disk(container["resources"])}
        if "resources" in container
        else container
    )


def workload_object(holder: QuotaHolder, request: QuotaRequest, priority: int | None) -> Object:
    """The Workload, owned by the job.

    Args:
        holder: The job.
        request: What it asks for.
        priority: The priority of its class; None where it names none.
    """
    spec: Object = {"queueName": request.queue, "podSets": list(request.pod_sets)}
    if priority is not None:
        reference = {"group": GROUP, "kind": PRIORITY_KIND, "name": request.priority_class}
        spec |= {"priorityClassRef": reference, "priority": priority}
    namespace, job = holder.key
    # The operator watches Workloads by the labels of an AgentRLJob's objects; an SFTJob's has one more.
    sft_labels = {SFT_LABEL: job} if holder.kind == SFT_KIND else {}
    metadata = {
        "name": holder.name,
        "namespace": namespace,
        "labels": {**labels(job), **sft_labels, JOB_UID_LABEL: holder.uid},
        "annotations": {REQUEST: request.digest},
        "ownerReferences": [owner(holder.kind, job, holder.uid)],
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


def unplaced_form(template: Mapping[str, Any]) -> Object:
    """What a Job remembers of a PodTemplate to which Kueue has added nothing."""
    metadata = template["metadata"]
    marks = {field: metadata[field] for field in MARKS if metadata.get(field)}
    return {"metadata": marks, "spec": counted(template["spec"])}


def holding(unplaced: Mapping[str, Any]) -> Object:
    """The change of a Job by which it has no pods, and remembers what its PodTemplate is without a place."""
    return {"metadata": {"annotations": {UNPLACED: json.dumps(unplaced, sort_keys=True)}}, "spec": {"suspend": True}}


def held(batch: Object) -> Object:
    """A Job that begins without pods, until the quota is there that it asks for."""
    hold, metadata = holding(unplaced_form(batch["spec"]["template"])), batch["metadata"]
    annotations = {**metadata.get("annotations", {}), **hold["metadata"]["annotations"]}
    return {**batch, "metadata": {**metadata, "annotations": annotations}, "spec": {**batch["spec"], **hold["spec"]}}


def sft_request(unplaced: Mapping[str, Any], queue: str, priority_class: str) -> QuotaRequest:
    """What an SFTJob needs to run, by what its Job remembers."""
    pod_set = {"name": SFT_POD_SET, "count": 1, "template": {"spec": unplaced["spec"]}}
    return request_of([pod_set], queue, priority_class)


def resuming(template: Mapping[str, Any], unplaced: Mapping[str, Any], place: Placement | None) -> Object:
    """The merge patch of a Job by which its pod runs where its quota is for, and not where an earlier one was.

    Args:
        template: Its PodTemplate.
        unplaced: What it remembers of that.
        place: The place; None where any node will do.
    """
    placed = with_placement({**unplaced}, place)
    metadata, spec = template.get("metadata", {}), template["spec"]
    marks = {field: _replaced(metadata.get(field), placed["metadata"].get(field)) for field in MARKS}
    selector = _replaced(spec.get("nodeSelector"), placed["spec"].get("nodeSelector"))
    directives = {"nodeSelector": selector, "tolerations": placed["spec"].get("tolerations")}
    return {"spec": {"suspend": False, "template": {"metadata": marks, "spec": directives}}}


def _replaced(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> Object:
    """The merge patch of a map to another, but for what Kubernetes has added to it."""
    surplus = [name for name in before or {} if not name.startswith(OF_KUBERNETES)]
    return {**dict.fromkeys(surplus), **(after or {})}
