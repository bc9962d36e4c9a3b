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
HELD = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken", "hostNetwork", "hostPID", "hostIPC")
"""What a pod may do in the cluster is not a job's to say: with another service account it would have that one's rights."""
OURS = ("kestrl.dev/", "app.kubernetes.io/")
OPEN = ("labels", "annotations")
"""Of a template's metadata."""


def patched(template: Object, patches: Sequence[tuple[str, Mapping[str, Any]]]) -> Object:
    """The template with all patches on it, in their order.

    Args:
        template: A PodTemplate.
        patches: Each with its place in the manifest, for messages.

    Raises:
        UserInputError: One changes what is not a job's to change, or is no patch; the message names the field.
    """
    for place, patch in patches:
        _check(place, patch)
        template = _merged(template, patch, place)
    return template


def _check(place: str, patch: Mapping[str, Any]) -> None:
    for field in sorted(set(patch) - {"metadata", "spec"}):
        raise UserInputError(f"{place}.{field}: a pod template has metadata and spec, nothing else")
    spec = _map(patch, "spec", place)
    volumes: object = spec.get("volumes", ())
    if "serviceAccountToken" in repr(volumes):
        raise UserInputError(f"{place}.spec.volumes: a pod of a job has no token of its ServiceAccount; remove it")
    for field in spec:
        if field in HELD:
            raise UserInputError(f"{place}.spec.{field}: is not a job's to change; remove it")
    metadata = _map(patch, "metadata", place)
    for field in sorted(set(metadata) - set(OPEN)):
        raise UserInputError(f"{place}.metadata.{field}: is not a job's to change; {' and '.join(OPEN)} are")
    for field in OPEN:
        for name in _map(metadata, field, f"{place}.metadata"):
            if name.startswith(OURS):
                raise UserInputError(f"{place}.metadata.{field}.{name}: is the operator's; use another name")


def _map(parent: Mapping[str, Any], field: str, place: str) -> Mapping[str, Any]:
    """A field that is a map, or is left out. Null would take away what is the operator's."""
    value: object = parent.get(field, {})
    if not isinstance(value, Mapping):
        raise UserInputError(f"{place}.{field}: must be a map")
    return cast("Mapping[str, Any]", value)


def _merged(base: Object, change: Mapping[str, Any], place: str) -> Object:
    made = dict(base)
    for name, value in change.items():
        old, here = made.get(name), f"{place}.{name}"
        if name.startswith("$"):
            raise UserInputError(f"{here}: is not known here; an item of a list is removed by `$patch: delete`")
        if value is None:
            made.pop(name, None)
        elif isinstance(value, Mapping):
            within = cast("Object", old) if isinstance(old, dict) else {}
            made[name] = _merged(within, cast("Mapping[str, Any]", value), here)
        elif name in MERGE_KEYS and isinstance(value, list):
            within = cast("list[Object]", old) if isinstance(old, list) else []
            made[name] = _merged_list(within, cast("list[object]", value), MERGE_KEYS[name], here)
        else:
            made[name] = value
    return made


def _merged_list(base: Sequence[Object], change: Sequence[object], key: str, place: str) -> list[Object]:
    made: dict[object, Object | None] = {item.get(key): item for item in base}
    for index, given in enumerate(change):
        item = cast("Object", given) if isinstance(given, dict) else {}
        name: object = item.get(key)
        if not isinstance(name, str | int):
            raise UserInputError(f"{place}[{index}]: must be a map with {key}, by which it is merged")
        if item.get("$patch") == "delete":
            made[name] = None  # its place is kept for one that takes its place
        else:
            made[name] = _merged(made.get(name) or {}, item, f"{place}[{index}]")
    return [item for item in made.values() if item is not None]
