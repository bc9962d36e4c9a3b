"""Changes that a person makes to the pods of a part, merged as `kubectl patch` merges them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kestrl.errors import UserInputError

Object = dict[str, Any]
MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a pod that are merged item by item, and by what; any other list is replaced."""
HELD = ("serviceAccountName", "automountServiceAccountToken", "hostNetwork", "hostPID", "hostIPC")
"""What a pod may do in the cluster is not a job's to say: with another service account it would have that one's rights."""
OURS = "kestrl.dev/"


def patched(template: Object, patches: Sequence[tuple[str, Mapping[str, Any]]]) -> Object:
    """The template with all patches on it, in their order.

    Args:
        template: A PodTemplate.
        patches: Each with its place in the manifest, for messages.

    Raises:
        UserInputError: One changes what is not a job's to change; the message names the field.
    """
    for place, patch in patches:
        _check(place, patch)
        template = _merged(template, patch)
    return template


def _check(place: str, patch: Mapping[str, Any]) -> None:
    unknown = sorted(set(patch) - {"metadata", "spec"})
    if unknown:
        raise UserInputError(f"{place}.{unknown[0]}: a pod template has metadata and spec, nothing else")
    for field in HELD:
        if field in _map(patch.get("spec"), f"{place}.spec"):
            raise UserInputError(f"{place}.spec.{field}: is not a job's to change; remove it")
    metadata = _map(patch.get("metadata"), f"{place}.metadata")
    for field in ("labels", "annotations"):
        for name in _map(metadata.get(field), f"{place}.metadata.{field}"):
            if name.startswith((OURS, "app.kubernetes.io/")):
                raise UserInputError(f"{place}.metadata.{field}.{name}: is the operator's; use another name")


def _map(value: object, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserInputError(f"{place}: must be a map")
    return cast("Mapping[str, Any]", value)


def _merged(base: Object, change: Mapping[str, Any]) -> Object:
    made = dict(base)
    for name, value in change.items():
        old = made.get(name)
        if value is None:
            made.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(old, dict):
            made[name] = _merged(cast("Object", old), cast("Mapping[str, Any]", value))
        elif name in MERGE_KEYS and isinstance(value, list) and isinstance(old, list):
            made[name] = _merged_list(cast("list[Object]", old), cast("list[Object]", value), MERGE_KEYS[name])
        else:
            made[name] = value
    return made


def _merged_list(base: Sequence[Object], change: Sequence[Object], key: str) -> list[Object]:
    made = {item.get(key): item for item in base}
    for item in change:
        name = item.get(key)
        if item.get("$patch") == "delete":
            made.pop(name, None)
        else:
            made[name] = _merged(made[name], item) if name in made else item
    return list(made.values())
