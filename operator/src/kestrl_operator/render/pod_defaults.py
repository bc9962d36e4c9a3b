"""What an administrator adds to the pods of every job: labels, variables, where they run and where they keep a model;
and where Kueue has quota for them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrl._shared.prepare import OBJECT_SCHEMES, PrepareSettings
from kestrl.storage.uris import scheme_of
from kestrl_operator.render.resources import with_model_disk
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.chart_values import Cluster, ModelCache, PodDefaults, Variable
from kestrl_operator.state.cluster import HOME

Object = dict[str, Any]
CACHE = f"{HOME}/cache"
"""Folder of the shared volume in pods that download a model with its weights."""
VOLUME = "model-cache"
USERS = frozenset({"agent", "environment"})
"""Containers with a user's image."""


def with_pod_defaults(template: Object, defaults: PodDefaults) -> Object:
    """A PodTemplate with the administrator's defaults. What it has by itself stays; a job's patches come after.

    Args:
        template: The template.
        defaults: The chart's jobs.podDefaults.
    """
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    for field, entries in (("labels", defaults.labels), ("annotations", defaults.annotations)):
        if entries:
            metadata[field] = {**entries, **metadata.get(field, {})}
    if defaults.node_selector:
        spec["nodeSelector"] = {**defaults.node_selector, **spec.get("nodeSelector", {})}
    if defaults.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *(dict(toleration) for toleration in defaults.tolerations)]
    if defaults.priority_class_name is not None:
        spec["priorityClassName"] = defaults.priority_class_name
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [_with_variables(container, defaults) for container in spec[field]]
    return {"metadata": metadata, "spec": spec}


def with_placement(template: Object, placement: Placement | None) -> Object:
    """A PodTemplate on the nodes that its quota is for. Labels and annotations that it has by itself stay: by those the
    job's objects find their pods.

    Args:
        template: The template.
        placement: The place; None where any node will do.
    """
    if placement is None:
        return template
    spec, metadata = dict(template["spec"]), dict(template["metadata"])
    for field, entries in (("labels", placement.labels), ("annotations", placement.annotations)):
        if entries:
            metadata[field] = {**entries, **metadata.get(field, {})}
    if placement.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **placement.node_selector}
    existing = spec.get("tolerations", [])
    added = [dict(toleration) for toleration in placement.tolerations if toleration not in existing]
    if added:
        spec["tolerations"] = [*existing, *added]
    return {**template, "metadata": metadata, "spec": spec}


def _is_for(variable: Variable, container: str) -> bool:
    """Whether a container gets a variable; with a user's image what may be a credential only by name."""
    if not variable.containers:
        return variable.value_from is None or container not in USERS
    return container in variable.containers


def _with_variables(container: Object, defaults: PodDefaults) -> Object:
    variables: Sequence[Object] = container.get("env", [])
    names = {variable["name"] for variable in variables}
    added = [
        variable.as_kubernetes()
        for variable in defaults.env
        if variable.name not in names and _is_for(variable, container["name"])
    ]
    return {**container, "env": [*variables, *added]} if added else container


def with_cache(reads: PrepareSettings, cluster: Cluster) -> PrepareSettings:
    """What a pod prepares, with the cluster's cache if it downloads weights."""
    if not downloads(reads) or cluster.model_cache == ModelCache():
        return reads
    return reads.model_copy(update={"model_cache": CACHE})


def downloads(reads: PrepareSettings) -> bool:
    """Whether a pod downloads a model with its weights."""
    return reads.model is not None and reads.model_weights and scheme_of(reads.model) in OBJECT_SCHEMES | {"hf"}


def with_model(template: Object, reads: PrepareSettings, cluster: Cluster, namespace: str, *, queued: bool) -> Object:
    """Pods that download a model: `prepare` writes it into the cluster's cache, from which the others read it, or their
    first container requests a place for it on the node's disk.

    A pod that waits in a queue requests none by default: Kueue admits no pod with a resource that its queue does not
    have.

    Args:
        template: The template, whose first container loads the model.
        reads: What they prepare.
        cluster: The administrator's settings.
        namespace: The job's namespace.
        queued: Whether each of them asks Kueue for quota.
    """
    if not downloads(reads):
        return template
    spec: Object = dict(template["spec"])
    if with_cache(reads, cluster).model_cache:
        spec["volumes"] = [*spec["volumes"], _volume(cluster.model_cache)]
        spec["initContainers"] = [_mounting(item, cluster, namespace) for item in spec["initContainers"]]
        spec["containers"] = [_mounting(item, cluster, namespace, readOnly=True) for item in spec["containers"]]
    elif not queued:
        loading, *beside = spec["containers"]
        spec["containers"] = [{**loading, "resources": with_model_disk(loading["resources"])}, *beside]
    return {**template, "spec": spec}


def _volume(cache: ModelCache) -> Object:
    if cache.claim is not None:
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}
    return {"name": VOLUME, "hostPath": {"path": cache.node_path, "type": "Directory"}}


def _mounting(container: Object, cluster: Cluster, namespace: str, **fields: bool) -> Object:
    # Namespaces share a node, and one must not read what another has a token for.
    part = {} if cluster.model_cache.node_path is None else {"subPath": namespace}
    mounted = {"name": VOLUME, "mountPath": CACHE, **part, **fields}
    return {**container, "volumeMounts": [*container["volumeMounts"], mounted]}
