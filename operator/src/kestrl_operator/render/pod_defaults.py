"""What an administrator adds to the pods of every job: labels, variables, where they run; and where Kueue has quota for
them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.chart_values import PodDefaults, Variable

Object = dict[str, Any]
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
