"""Pods: their common restrictions, and how a component of the plan becomes a container."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.plan.components import Component, Role, SecretKey
from kestrl._shared.plan.settings.common import INDEX_VARIABLE, POD_UID_VARIABLE, REPLICA_VARIABLE
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl_operator.render.commands import command
from kestrl_operator.render.resources import resources_of
from kestrl_operator.render.volumes import (
    claimed,
    mounts,
    storage_volumes,
    user_secret_volumes,
    volumes,
    with_storage,
    with_user_secrets,
)
from kestrl_operator.state.accelerators import Profile
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.cluster import HOME, PREPARE, SETTINGS

Object = dict[str, Any]
USER = 10001
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""With `POD_SECURITY`, what Pod Security "restricted" requires, and a read-only root file system."""
START_SECONDS = 1200
"""Seconds in which an engine loads a large model before its start counts as failed."""
CLAIMS_ACCOUNT = "kestrl-sandbox-claims"
"""ServiceAccount of the tool pods of jobs that claim sandboxes. The owner of the warm pool makes it, with its Role, so
that the operator needs no right to grant rights, and a job cannot choose another account."""
DEVICE_ROLES = (Role.INFERENCE, Role.LEARNER, Role.RANKS)
"""Roles whose pods may have devices."""
STORAGE_ROLES = frozenset({Role.LEARNER, Role.RANKS, Role.INFERENCE, Role.MLFLOW})
"""Roles whose programs read and write object storage. A tool never gets its credentials."""
UNPREPARED = frozenset({Role.JUDGE, Role.MLFLOW})  # neither model nor data is in their pods


def pod_security(profile: Profile) -> Object:
    """The security context of the pods of a profile."""
    return {**POD_SECURITY, **profile.pod_security.changes()}


def container_security(profile: Profile) -> Object:
    """The security context of a container that computes on devices of a profile."""
    if not profile.capabilities:
        return CONTAINER_SECURITY
    return {**CONTAINER_SECURITY, "capabilities": {"drop": ["ALL"], "add": list(profile.capabilities)}}


def program(role: Role) -> Role:
    """The role whose image, container name, resources, devices and patches the pods of a role have."""
    return Role.LEARNER if role is Role.RANKS else role


def container(
    job: str,
    component: Component,
    image: str,
    cluster: Cluster,
    profile: Profile,
    store: str | None,
    claims: Sequence[str],
) -> Object:
    """The container of a component.

    Args:
        job: Name of the job.
        component: The component of the plan.
        image: Its image.
        cluster: The administrator's settings.
        profile: Its accelerator profile.
        store: The Secret with the object storage's credentials, for learner and engine agent only.
        claims: Volumes with models or data that it finds links into.
    """
    ports = [{"name": name, "containerPort": port} for name, port in component.ports.items()]
    spec: Object = {
        "name": str(program(component.role)),
        "image": image,
        "imagePullPolicy": cluster.images.pull_policy,
        "command": command(component, profile),
        "args": [*_settings_flag(component), *component.args],
        "env": environment(job, component, profile),
        "ports": ports,
        "securityContext": container_security(profile),
        "volumeMounts": [*mounts(component.role, profile), *claimed(claims)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **probes(component),
    }
    if component.role in STORAGE_ROLES:
        spec = with_storage(spec, store)
    if component.user_secrets:
        spec = with_user_secrets(spec)
    devices = profile.requests(component.device.count)
    return {**spec, "resources": resources_of(program(component.role).value, cluster, devices)}


def _settings_flag(component: Component) -> list[str]:
    if component.settings is None:
        return []
    return ["--settings", f"{SETTINGS}/{component.role}.json"]


def environment(job: str, component: Component, profile: Profile) -> list[Object]:
    """Environment variables: those of the plan, the credentials that the component lists, its entries of the user's
    secrets, its identity, and those of its accelerator profile.
    """
    plain = [{"name": name, "value": value} for name, value in {**component.env_defaults, **component.env}.items()]
    secret = [
        {"name": item.value, "valueFrom": {"secretKeyRef": {"name": credentials(job), "key": item.value}}}
        for item in component.secrets
    ]
    secret += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": entry.secret, "key": entry.key}}}
        for name, entry in component.user_secrets.items()
    ]
    identity = [_from_field(REPLICA_VARIABLE, "metadata.name"), {"name": "HOME", "value": "/tmp"}]  # noqa: S108
    if component.role in {Role.INFERENCE, Role.RANKS}:
        identity.append(_from_field(INDEX_VARIABLE, "metadata.labels['apps.kubernetes.io/pod-index']"))
    if isinstance(component.settings, ToolsSettings) and any(tool.claim for tool in component.settings.tools):
        identity.append(_from_field(POD_UID_VARIABLE, "metadata.uid"))
    return [*plain, *secret, *identity, *profile.environment()]


def credentials(job: str) -> str:
    """The Secret with the credentials of the job's components.

    Objects that are not watched have a suffix that makes a clash unlikely: an existing object of that name would become
    the job's.
    """
    return f"{job}-agentrljob"


def account(job: str) -> str:
    """The ServiceAccount of all pods, except tool pods that claim sandboxes."""
    return f"{job}-agentrljob"


def from_secret(name: str | None) -> Object:
    """All keys of a Secret as environment variables, as of the start of the container."""
    return {} if name is None else {"envFrom": [{"secretRef": {"name": name}}]}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def probes(component: Component) -> Object:
    """The probes of a component, with enough time to start for a large model."""
    ready = component.ready
    if ready is None:
        return {}
    handler: Object = (
        {"grpc": {"port": ready.port}}
        if ready.http_path is None
        else {"httpGet": {"port": ready.port, "path": ready.http_path}}
    )
    return {
        "startupProbe": {**handler, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": START_SECONDS // 5},
        "readinessProbe": {**handler, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**handler, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def settings_map(job: str) -> str:
    """The ConfigMap with every component's settings."""
    return f"{job}-agentrljob"


def preparing(image: str, role: str, cluster: Cluster, store: str | None, claims: Sequence[str]) -> Object:
    """The init container that downloads model, data and template. It runs the image of the pod's own program."""
    return {
        "name": PREPARE,
        "image": image,
        "imagePullPolicy": cluster.images.pull_policy,
        "command": ["python", "-m", "kestrl._shared.prepare", "--settings", f"{SETTINGS}/prepare-{role}.json"],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *claimed(claims),
        ],
        "resources": resources_of(PREPARE, cluster),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **from_secret(store),
    }


def template(
    job: str,
    role: Role,
    containers: Sequence[Object],
    *,
    cluster: Cluster,
    profile: Profile,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    store: str | None,
    claims: Sequence[str],
    entries: Mapping[str, SecretKey],
    runtime_class: str | None,
    preparing_image: str,
    claims_sandboxes: bool = False,
    grace: int,
) -> Object:
    """The pod template of a role. It changes only with what its pods read, so that nothing else rolls them."""
    prepares = role not in UNPREPARED
    spec: Object = {
        "serviceAccountName": CLAIMS_ACCOUNT if claims_sandboxes else account(job),
        "automountServiceAccountToken": claims_sandboxes,
        "enableServiceLinks": False,
        "securityContext": pod_security(profile),
        "terminationGracePeriodSeconds": grace,
        "containers": list(containers),
        "volumes": [
            *volumes(settings_map(job), role, profile, claims),
            *storage_volumes(store if role in STORAGE_ROLES else None),
            *user_secret_volumes(entries),
        ],
    }
    if prepares:
        spec["initContainers"] = [preparing(preparing_image, role, cluster, store, claims)]
    spec |= {**placement(cluster, profile), **nearness(job, profile)}
    if runtime_class is not None:
        spec["runtimeClassName"] = runtime_class
    return {"metadata": {"labels": {**labels, **profile.labels}, "annotations": dict(annotations)}, "spec": spec}


def placement(cluster: Cluster, profile: Profile) -> Object:
    """Fields of a pod that decide which nodes take it, and which secrets pull its images."""
    spec: Object = {}
    if cluster.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.images.pull_secrets]
    if profile.resource is not None:
        spec["tolerations"] = [item.model_dump(exclude_none=True) for item in profile.tolerations]
    if profile.node_selector:
        spec["nodeSelector"] = dict(profile.node_selector)
    if profile.scheduler is not None:
        spec["schedulerName"] = profile.scheduler
    return spec


def nearness(job: str, profile: Profile) -> Object:
    """The wish of pods with devices to be near the others of their job: on one node where they fit. No pod waits for
    it.
    """
    if not profile.topology_keys:
        return {}
    selector = {
        "matchLabels": {"kestrl.dev/job": job},
        "matchExpressions": [
            {"key": "kestrl.dev/role", "operator": "In", "values": [str(role) for role in DEVICE_ROLES]}
        ],
    }
    terms = [
        {"weight": 100 // (1 + place), "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
        for place, key in enumerate(profile.topology_keys)
    ]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}}


def checksum(settings: Mapping[str, str]) -> str:
    """Digest of the settings that a role's pods read."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
