"""What an administrator adds to the pods of every job: labels, variables, where they run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrl_operator.state.cluster import PodDefaults

Object = dict[str, Any]


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
        spec["tolerations"] = [*spec.get("tolerations", []), *(dict(each) for each in defaults.tolerations)]
    if defaults.priority_class_name is not None:
        spec["priorityClassName"] = defaults.priority_class_name
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [_with_variables(container, defaults) for container in spec[field]]
    return {"metadata": metadata, "spec": spec}


def _with_variables(container: Object, defaults: PodDefaults) -> Object:
    own: Sequence[Object] = container.get("env", [])
    names = {variable["name"] for variable in own}
    added = [
        variable.as_kubernetes()
        for variable in defaults.env
        if variable.name not in names and (not variable.containers or container["name"] in variable.containers)
    ]
    return {**container, "env": [*own, *added]} if added else container
