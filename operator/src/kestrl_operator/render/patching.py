"""Patches of a component's pods, merged like a strategic merge patch of `kubectl patch`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from kestrl.errors import UserInputError
from kestrl_operator.state.chart_values import RESERVED_PREFIXES

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
"""Lists of a pod that are merged item by item, with their merge key; any other list is replaced."""
RESERVED_FIELDS = (
    "serviceAccountName",
    "serviceAccount",
    "automountServiceAccountToken",
    "hostNetwork",
    "hostPID",
    "hostIPC",
)
"""Fields that jobs must not change: with another service account, for example, a pod would get the rights of that
account."""
STEP = re.compile(r"\.?([A-Za-z]+)|\[([^\[\]]+)\]")
"""A step of a path: a field, or an item by its name."""
PATCHABLE_METADATA = ("labels", "annotations")
"""Fields of a template's metadata that a patch may change."""


class PodPatch(NamedTuple):
    """A patch of a PodTemplate."""

    place: str
    """Its path in the manifest, for messages."""
    template: Mapping[str, Any]
    remove: Sequence[str] = ()
    """Paths to remove after that, as `removal` reads them."""


def patched(template: Object, patches: Sequence[PodPatch]) -> Object:
    """The template with all patches applied in order.

    Args:
        template: A PodTemplate.
        patches: The patches.

    Raises:
        UserInputError: A patch is invalid or changes a field that jobs must not change; the message names the field.
    """
    for patch in patches:
        place = f"{patch.place}.template"
        _check(place, patch.template)
        template = _merged(template, patch.template, place)
        for index, path in enumerate(patch.remove):
            place, steps = f"{patch.place}.remove[{index}]", STEP.findall(path)
            removal = _removal([field or item for field, item in steps], path, place)
            _check(place, removal)
            if _has(template, [field or item for field, item in steps]):
                template = _merged(template, removal, place)
    return template


def _removal(steps: Sequence[str], path: str, place: str, key: str | None = None) -> Object:
    """The patch that removes what a path leads to, from its first step on.

    Args:
        steps: Names of fields and items.
        path: The whole path, for messages.
        place: Place of the path in the manifest, for messages.
        key: Merge key of the list that the first step is an item of; None where it is a field.
    """
    name, *rest = steps
    if key is not None:
        item: Object = {key: int(name) if name.isdecimal() else name}
        return {**item, "$patch": "delete"} if not rest else {**_removal(rest, path, place), **item}
    if not rest:
        return {name: None}
    if name in MERGE_KEYS:
        return {name: [_removal(rest, path, place, MERGE_KEYS[name])]}
    return {name: _removal(rest, path, place)}


def _has(value: Any, steps: Sequence[str], key: str | None = None) -> bool:
    """Whether a path leads to something: what is not there need not be removed."""
    if not steps:
        return True
    name, *rest = steps
    if key is not None:
        items = cast("list[Object]", value) if isinstance(value, list) else []
        return any(str(item.get(key)) == name and _has(item, rest) for item in items)
    if not isinstance(value, dict) or name not in value:
        return False
    return _has(cast("Object", value)[name], rest, MERGE_KEYS.get(name))


def _check(place: str, patch: Mapping[str, Any]) -> None:
    for field in sorted(set(patch) - {"metadata", "spec"}):
        raise UserInputError(f"{place}.{field}: a pod template has metadata and spec, nothing else")
    spec = _map(patch, "spec", place)
    volumes: object = spec.get("volumes", ())
    if "serviceAccountToken" in repr(volumes):
        raise UserInputError(f"{place}.spec.volumes: a pod of a job gets no token of its ServiceAccount; remove it")
    for field in spec:
        if field in RESERVED_FIELDS:
            raise UserInputError(f"{place}.spec.{field}: cannot be changed by a job; remove it")
    metadata = _map(patch, "metadata", place)
    for field in sorted(set(metadata) - set(PATCHABLE_METADATA)):
        raise UserInputError(
            f"{place}.metadata.{field}: cannot be changed by a job; {' and '.join(PATCHABLE_METADATA)} can"
        )
    for field in PATCHABLE_METADATA:
        for name in _map(metadata, field, f"{place}.metadata"):
            if name.startswith(RESERVED_PREFIXES):
                raise UserInputError(f"{place}.metadata.{field}.{name}: is reserved for the operator; use another name")


def _map(parent: Mapping[str, Any], field: str, place: str) -> Mapping[str, Any]:
    """A field that is a map, or is missing. Null is refused, since it would remove the operator's own values."""
    value: object = parent.get(field, {})
    if not isinstance(value, Mapping):
        raise UserInputError(f"{place}.{field}: must be a map")
    return cast("Mapping[str, Any]", value)


def _merged(base: Object, change: Mapping[str, Any], place: str) -> Object:
    fields = dict(base)
    for name, value in change.items():
        old, field = fields.get(name), f"{place}.{name}"
        if name.startswith("$"):
            raise UserInputError(f"{field}: is not supported; use `$patch: delete` to remove an item of a list")
        if value is None:
            fields.pop(name, None)
        elif isinstance(value, Mapping):
            within = cast("Object", old) if isinstance(old, dict) else {}
            fields[name] = _merged(within, cast("Mapping[str, Any]", value), field)
        elif name in MERGE_KEYS and isinstance(value, list):
            within = cast("list[Object]", old) if isinstance(old, list) else []
            fields[name] = _merged_list(within, cast("list[object]", value), MERGE_KEYS[name], field)
        else:
            fields[name] = value
    return fields


def _merged_list(base: Sequence[Object], change: Sequence[object], key: str, place: str) -> list[Object]:
    items_by_name: dict[object, Object | None] = {item.get(key): item for item in base}
    for index, element in enumerate(change):
        item = cast("Object", element) if isinstance(element, dict) else {}
        name: object = item.get(key)
        if not isinstance(name, str | int):
            raise UserInputError(f"{place}[{index}]: must be a map with {key}, the merge key")
        if item.get("$patch") == "delete":
            items_by_name[name] = None  # keeps its position for a replacement
        else:
            items_by_name[name] = _merged(items_by_name.get(name) or {}, item, f"{place}[{index}]")
    return [item for item in items_by_name.values() if item is not None]
