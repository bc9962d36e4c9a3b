"""The volume with the files that tools read: one pod with the storage's credentials fetches them, and tools, which have
neither credentials nor egress, mount it read-only. Pure.

A volume that one node at a time may mount is the common kind, so that tools run on the node of the pod that holds it.
"""

from __future__ import annotations

from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.prepare import FileSource
from kestrl._shared.spec.job import AgentRLJob, DataFile, JobSpec
from kestrl._shared.spec.scalars import PinnedFile
from kestrl_operator.render import network
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.cluster import FILES, placed_file, workload

Object = dict[str, Any]
VOLUME = "files"
NODE = "kubernetes.io/hostname"


def file_sources(spec: JobSpec) -> tuple[FileSource, ...]:
    """The files of the volume."""
    return tuple(
        source
        for index, file in enumerate(spec.data.files)
        if (source := _source(file, f"spec.data.files[{index}]")) is not None
    )


def _source(file: DataFile, field: str) -> FileSource | None:
    pinned, target = PinnedFile.read(file.uri), placed_file(file.uri)
    if pinned is None or target is None:
        return None
    return FileSource(
        address=pinned.address,
        digest=pinned.digest,
        target=target,
        most_bytes=file.most_bytes,
        seconds=file.timeout,
        field=field,
    )


def claims(spec: JobSpec, role: Role, cluster: Cluster) -> Object:
    """The claim of the pod of a role that keeps something, and what becomes of it; nothing for other roles."""
    if role not in {Role.FILES, Role.LEARNER}:
        return {}
    of_learner = role is Role.LEARNER
    size = cluster.learner_state.size if of_learner else f"{spec.data.files_gib}Gi"
    claim_spec: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if cluster.learner_state.storage_class is not None:
        claim_spec["storageClassName"] = cluster.learner_state.storage_class
    return {
        "volumeClaimTemplates": [{"metadata": {"name": "state" if of_learner else VOLUME}, "spec": claim_spec}],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
    }


def with_files(template: Object, role: Role, job: AgentRLJob) -> Object:
    """The pods of a role; those that fetch files, and those of the tools, with the volume and near each other."""
    if role not in {Role.FILES, Role.TOOLS} or not job.spec.data.files:
        return template
    fetches = role is Role.FILES
    spec: Object = dict(template["spec"])
    mounted = {"name": VOLUME, "mountPath": FILES, **({} if fetches else {"readOnly": True})}
    for kind in ("initContainers", "containers"):
        spec[kind] = [{**container, "volumeMounts": [*container["volumeMounts"], mounted]} for container in spec[kind]]
    if not fetches:
        claim_source = {"claimName": f"{VOLUME}-{workload(job.metadata.name, Role.FILES)}-0", "readOnly": True}
        spec["volumes"] = [*spec["volumes"], {"name": VOLUME, "persistentVolumeClaim": claim_source}]
    other = Role.TOOLS if fetches else Role.FILES
    term = {"labelSelector": {"matchLabels": network.selector(job.metadata.name, other)}, "topologyKey": NODE}
    affinity: Object = dict(spec.get("affinity") or {})
    # Where tools hold the volume on a node already, another node cannot have it.
    wish = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    affinity["podAffinity"] = wish if fetches else {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    spec["affinity"] = affinity
    return {**template, "spec": spec}
