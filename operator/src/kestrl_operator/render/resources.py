"""Requests and limits of every container of a job. Pure.

No container is without requests: a pod of such containers is the first to be evicted, and a ResourceQuota on requests
refuses it. The defaults are what an idle container of a small job uses, so that they fit anywhere. There are no default
limits: what a model, a data set or a user's code needs is not known here, and a guessed limit kills it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl_operator.state.accelerators import quantity
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.cluster import PREPARE

Object = dict[str, Any]
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "engine": {"cpu": "100m", "memory": "512Mi"},
    "inference": {"cpu": "50m", "memory": "128Mi"},
    "rollout": {"cpu": "50m", "memory": "256Mi"},
    "agent": {"cpu": "50m", "memory": "256Mi"},
    "tools": {"cpu": "50m", "memory": "128Mi"},
    "files": {"cpu": "10m", "memory": "32Mi"},
    "environment": {"cpu": "50m", "memory": "256Mi"},
    "judge": {"cpu": "50m", "memory": "128Mi"},
    "mlflow": {"cpu": "10m", "memory": "256Mi"},
    "learner": {"cpu": "100m", "memory": "512Mi"},
    PREPARE: {"cpu": "50m", "memory": "128Mi"},
}
"""Requests by container."""
DISK, MODEL_DISK = "ephemeral-storage", "2Gi"
"""Resource and default request of a pod for a model that it downloads to its node's disk. An address does not say how
large a model is: this is one of a billion parameters."""


def resources_of(name: str, cluster: Cluster, devices: Mapping[str, str] | None = None) -> Object:
    """Requests and limits of a container: the defaults, changed by the chart's `jobs.resources`, and its devices.

    A resource of which the chart has only a limit is requested by as much, as Kubernetes does it.

    Args:
        name: Name of the container, of `DEFAULTS`.
        cluster: The administrator's settings.
        devices: Extended resources, which are requested and limited alike.
    """
    by_name: Mapping[str, Mapping[str, Any]] = {**cluster.resources}
    configured = by_name.get(name, {})
    limits: Mapping[str, Any] = configured.get("limits", {})
    defaults = {resource: amount for resource, amount in DEFAULTS[name].items() if resource not in limits}
    extended = devices or {}
    requirements: Object = {**configured, "requests": {**defaults, **configured.get("requests", {}), **extended}}
    if not requirements["requests"]:
        del requirements["requests"]
    return {**requirements, "limits": {**limits, **extended}} if limits or extended else requirements


def with_model_disk(resources: Object) -> Object:
    """Requirements with the default request for a model, unless the administrator has set that resource."""
    requests = resources.get("requests", {})
    if DISK in requests or DISK in resources.get("limits", {}):
        return resources
    return {**resources, "requests": {**requests, DISK: MODEL_DISK}}


def without_model_disk(resources: Object) -> Object:
    """Requirements without the default request for a model."""
    requests: Mapping[str, Any] = resources.get("requests", {})
    if requests.get(DISK) != MODEL_DISK:
        return resources
    return {**resources, "requests": {name: amount for name, amount in requests.items() if name != DISK}}


def within_limits(template: Object) -> Object:
    """A pod template in which no default request exceeds a limit that a patch has set: a patch needs to name the limit
    only.
    """
    spec = template["spec"]
    kinds = [kind for kind in ("initContainers", "containers") if kind in spec]
    return {**template, "spec": {**spec, **{kind: _fitted(spec[kind]) for kind in kinds}}}


def _fitted(containers: Sequence[Object]) -> list[Object]:
    return [
        {**item, "resources": _capped(item["name"], item["resources"])} if "resources" in item else item
        for item in containers
    ]


def _capped(name: str, resources: Object) -> Object:
    defaults = {**DEFAULTS.get(name, {}), DISK: MODEL_DISK}
    limits: Mapping[str, object] = resources.get("limits") or {}
    requests: Object = {**(resources.get("requests") or {})}
    for resource, amount in defaults.items():
        limit = limits.get(resource)
        if limit is not None and requests.get(resource) == amount and _exceeds(amount, limit):
            requests[resource] = limit
    return {**resources, "requests": requests} if requests else resources


def _exceeds(amount: str, limit: object) -> bool:
    try:
        return quantity(amount) > quantity(str(limit))
    except ValueError:
        return False  # the API server refuses it, with the field
