"""Volumes of pods and their mounts: settings, work, devices, claims, and Secrets that containers read as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.plan.components import Role, SecretKey
from kestrl._shared.prepare import PrepareSettings
from kestrl._shared.user_secrets import FOLDER_VARIABLE as USER_SECRETS_VARIABLE
from kestrl.storage.credentials import FOLDER_VARIABLE
from kestrl_operator.state.accelerators import HostMount, Profile
from kestrl_operator.state.cluster import HOME, SETTINGS, STATE, WORK

Object = dict[str, Any]
CLAIMS = PrepareSettings().volumes
STORAGE_SECRET = "/kestrl-secrets/storage"  # noqa: S105 - a folder
"""Folder of the storage's Secret in containers that use storage."""
USER_SECRETS = "/kestrl-secrets/user"
"""Folder of the entries of the user's Secrets that a container needs."""


def with_storage(container: Object, store: str | None) -> Object:
    """A container that reads the storage's Secret from files, in which the kubelet follows every change of it."""
    if store is None:
        return container
    folder = {"name": FOLDER_VARIABLE, "value": STORAGE_SECRET}
    mounted = {"name": "storage-secret", "mountPath": STORAGE_SECRET, "readOnly": True}
    return {
        **container,
        "env": [*container["env"], folder],
        "volumeMounts": [*container["volumeMounts"], mounted],
    }


def with_user_secrets(container: Object) -> Object:
    """A container that reads its entries of the user's Secrets from files, too, in which the kubelet follows changes. A
    missing Secret is reported by the variables.
    """
    folder = {"name": USER_SECRETS_VARIABLE, "value": USER_SECRETS}
    mounted = {"name": "user-secrets", "mountPath": USER_SECRETS, "readOnly": True}
    return {
        **container,
        "env": [*container["env"], folder],
        "volumeMounts": [*container["volumeMounts"], mounted],
    }


def user_secret_volumes(entries: Mapping[str, SecretKey]) -> list[Object]:
    """The volume of `with_user_secrets`: each entry as a file with the name of its variable."""
    if not entries:
        return []
    sources = [
        {"secret": {"name": entry.secret, "items": [{"key": entry.key, "path": variable}], "optional": True}}
        for variable, entry in entries.items()
    ]
    return [{"name": "user-secrets", "projected": {"sources": sources, "defaultMode": 0o440}}]


def storage_volumes(store: str | None) -> list[Object]:
    """The volume of `with_storage`. A Secret that does not exist is reported of the container `prepare`, which has it
    as variables: of a volume it would be in events alone.
    """
    if store is None:
        return []
    return [{"name": "storage-secret", "secret": {"secretName": store, "optional": True, "defaultMode": 0o440}}]


def claimed(claims: Sequence[str]) -> list[Object]:
    """Mounts of the claims that the manifest's pvc:// addresses name."""
    return [{"name": f"claim-{claim}", "mountPath": f"{CLAIMS}/{claim}", "readOnly": True} for claim in claims]


def mounts(role: Role, profile: Profile) -> list[Object]:
    """The mounts of a container."""
    read_only = role is Role.AGENT  # what the init container has put there is not the user's to change
    inside = [("settings", SETTINGS, True), ("home", HOME, read_only), ("tmp", "/tmp", False)]  # noqa: S108
    if role in {Role.ENGINE, Role.INFERENCE}:
        inside.append(("work", WORK, False))
    if role is Role.LEARNER:
        inside.append(("state", STATE, False))
    volume_mounts: list[Object] = [
        {"name": name, "mountPath": path, **({"readOnly": True} if fixed else {})} for name, path, fixed in inside
    ]
    return (
        [*volume_mounts, *device_mounts(profile)] if role in {Role.ENGINE, Role.LEARNER, Role.RANKS} else volume_mounts
    )


def device_mounts(profile: Profile) -> list[Object]:
    """The mounts of a container that computes on devices."""
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
    devices = [
        {"name": f"devices-{number}", "mountPath": mount.path, "readOnly": mount.read_only}
        for number, mount in enumerate(profile.host_mounts)
    ]
    return [shared, *devices]


def volumes(settings_map: str, role: Role, profile: Profile, claims: Sequence[str]) -> list[Object]:
    """The volumes of a role's pods; the learner's state is a claim of its StatefulSet.

    Args:
        settings_map: Name of the ConfigMap with every component's settings.
        role: The role.
        profile: Its accelerator profile.
        claims: Volumes with models or data.
    """
    files = [{"key": file, "path": file} for file in (f"{role}.json", f"prepare-{role}.json")]
    visible_files = {Role.AGENT: files, Role.MLFLOW: files[:1]}  # not what others of the job are configured with
    readable: Object = {"items": visible_files[role]} if role in visible_files else {}
    pod_volumes: list[Object] = [
        {"name": "settings", "configMap": {"name": settings_map, **readable}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if role is Role.INFERENCE:
        pod_volumes.append({"name": "work", "emptyDir": {}})
    if role in {Role.INFERENCE, Role.LEARNER, Role.RANKS}:
        pod_volumes += device_volumes(profile)
    return [*pod_volumes, *claim_volumes(claims)]


def device_volumes(profile: Profile) -> list[Object]:
    """The volumes of pods that compute on devices."""
    paths = [
        {"name": f"devices-{number}", "hostPath": _host_path(mount)} for number, mount in enumerate(profile.host_mounts)
    ]
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *paths]


def _host_path(mount: HostMount) -> Object:
    return {"path": mount.path} if mount.type is None else {"path": mount.path, "type": mount.type}


def claim_volumes(claims: Sequence[str]) -> list[Object]:
    """Volumes of the claims that the manifest's pvc:// addresses name."""
    return [
        {"name": f"claim-{claim}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for claim in claims
    ]
