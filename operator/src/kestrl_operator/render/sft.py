"""All objects of an SFTJob: a Job of Kubernetes with one pod, and what that pod needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.plan.components import TORCH_DEFAULTS
from kestrl._shared.plan.sft import SFTSettings, sft_settings
from kestrl._shared.prepare import DataSource, PrepareSettings
from kestrl._shared.spec.inference import Accelerator
from kestrl._shared.spec.sft import SFT_KIND, Conversations, SFTJob
from kestrl.errors import UserInputError
from kestrl_operator.render.commands import under_init
from kestrl_operator.render.identity import metadata_egress, with_identity
from kestrl_operator.render.job import claims_in, owner
from kestrl_operator.render.network import outside
from kestrl_operator.render.pod_defaults import with_cache, with_model, with_pod_defaults
from kestrl_operator.render.pods import Object, container_security, placement, pod_security, preparing
from kestrl_operator.render.resources import resources_of
from kestrl_operator.render.volumes import (
    claim_volumes,
    claimed,
    device_mounts,
    device_volumes,
    storage_volumes,
    with_storage,
)
from kestrl_operator.state.accelerators import Profile
from kestrl_operator.state.chart_values import Cluster, ServiceAccount
from kestrl_operator.state.cluster import DATA, HOME, MODEL, SETTINGS, prepared
from kestrl_operator.state.sft import CONTAINER, SFT_LABEL
from kestrl_operator.state.snapshot import STORAGE, UID_LABEL

PROFILES = {"cpu": "cpu", "cuda": "nvidia", "npu": "ascend"}
"""Accelerator profiles by torch device, where the manifest names none."""
GRACE_SECONDS = 180
"""Seconds between SIGTERM and SIGKILL of the pod."""
PODS = 4
"""Pods that may fail before the job does."""
STOPPED = (128 + 2, 128 + 15)
"""Exit codes of programs that were asked to stop."""
RESULT = "/dev/termination-log"
"""Kubernetes' file for a container's last message, from which the operator reads the adapter's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTGiven:
    """The inputs of rendering."""

    job: SFTJob
    namespace: str
    uid: str
    cluster: Cluster
    storage: str
    """Storage of the runs, recorded on the Job: the run stays there even if the administrator's default changes."""
    secret: str | None
    """The Secret with the object storage's credentials."""
    identity: ServiceAccount | None = None
    """The ServiceAccount whose cloud identity reaches the object storage."""
    queue_labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels by which Kueue's own integration of Jobs queues the Job."""

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def run(self) -> str:
        """Address of this run's folder."""
        return f"{self.storage.rstrip('/')}/{self.name}-{self.uid.partition('-')[0]}"


def batch_name(job: str) -> str:
    """The Job of an SFTJob, and its NetworkPolicy."""
    return f"{job}-sft"


def support_name(job: str) -> str:
    """The ConfigMap and ServiceAccount of an SFTJob."""
    return f"{job}-{SFT_KIND.lower()}"


def render_sft(inputs: SFTGiven) -> list[Object]:
    """Every object of the job, with owner and labels; the Job last.

    Raises:
        UserInputError: The manifest asks for devices that do not fit each other, or that this cluster has no image for.
    """
    profile = profile_of(inputs.job, inputs.cluster)
    settings = {
        "sft.json": _settings(inputs, profile).model_dump_json(indent=2),
        "prepare-sft.json": with_cache(preparation(inputs.job), inputs.cluster).model_dump_json(indent=2),
    }
    objects = [
        _object(inputs, "v1", "ConfigMap", support_name(inputs.name), data=settings),
        _object(inputs, "v1", "ServiceAccount", support_name(inputs.name), automountServiceAccountToken=False),
    ]
    if inputs.cluster.network_policies:
        policy: Object = {
            "podSelector": {"matchLabels": {SFT_LABEL: inputs.name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [*outside(inputs.cluster.egress_ports), *metadata_egress(inputs.identity)],
        }
        objects.append(_object(inputs, "networking.k8s.io/v1", "NetworkPolicy", batch_name(inputs.name), spec=policy))
    batch = _object(inputs, "batch/v1", "Job", batch_name(inputs.name), spec=_batch_spec(inputs, profile))
    batch["metadata"]["labels"] |= inputs.queue_labels
    batch["metadata"]["annotations"] = {STORAGE: inputs.storage}
    return [*objects, batch]


def accelerator_of(job: SFTJob) -> Accelerator:
    """The devices of the job's pod."""
    learner = job.spec.learner
    return learner.accelerator or Accelerator(profile=PROFILES[learner.device.partition(":")[0]])


def profile_of(job: SFTJob, cluster: Cluster) -> Profile:
    """The accelerator profile of the job's pod.

    Raises:
        UserInputError: It is unknown, does not fit `device`, or there is no image for it.
    """
    accelerator, device, field = accelerator_of(job), job.spec.learner.device, "spec.learner.accelerator"
    try:
        profile = cluster.profile(accelerator.profile)
    except UserInputError as error:
        raise UserInputError(f"spec.learner.{error}") from error
    if device.partition(":")[0] != profile.device:
        raise UserInputError(
            f"{field}.profile: {accelerator.profile!r} has devices of kind {profile.device!r}, and "
            f"spec.learner.device is {device!r}; make them the same"
        )
    if profile.image not in cluster.images.learner:
        images = ", ".join(sorted(cluster.images.learner))
        raise UserInputError(
            f"spec.learner.device: this cluster has no image for {profile.image!r} (the chart's "
            f"jobs.images.learner.{profile.image}); there are: {images}"
        )
    return profile


def preparation(job: SFTJob) -> PrepareSettings:
    """What the pod prepares. The episodes of a run are read from their storage while it trains."""
    spec = job.spec
    sets = {"train": spec.data.train, "validation": spec.data.validation}
    return PrepareSettings(
        model=spec.model.base,
        model_target=MODEL,
        data=tuple(
            DataSource(uri=item.uri, size=item.size, target=prepared(name, item.uri), field=f"spec.data.{name}.uri")
            for name, item in sets.items()
            if item is not None and item.uri is not None
        ),
        data_dir=DATA,
        seed=spec.data.seed,
        template=spec.template,
        template_target=f"{DATA}/template.jinja",
        template_field="spec.template",
    )


def _settings(inputs: SFTGiven, profile: Profile) -> SFTSettings:
    spec = inputs.job.spec

    def file_of(name: str, data: Conversations | None) -> str | None:
        return None if data is None or data.uri is None else prepared(name, data.uri)

    settings = sft_settings(
        inputs.job,
        model=MODEL,
        train=file_of("train", spec.data.train),
        validation=file_of("validation", spec.data.validation),
        template=None if spec.template is None else f"{DATA}/template.jinja",
        storage=inputs.run,
    )
    return settings.model_copy(update={"device": profile.device})  # a pod sees its own devices only


def _batch_spec(inputs: SFTGiven, profile: Profile) -> Object:
    pods: Object = {
        "metadata": {"labels": {**_labels(inputs.name), UID_LABEL: inputs.uid, **profile.labels}},
        "spec": _pod(inputs, profile),
    }
    reads, queued = preparation(inputs.job), bool(inputs.queue_labels)
    pods = with_model(pods, reads, inputs.cluster, inputs.namespace, queued=queued)
    if inputs.identity is not None:
        pods = with_identity(pods, inputs.identity, [CONTAINER])
    stopped = {"operator": "In", "values": list(STOPPED)}
    refused = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_INPUT]}
    return {
        "backoffLimit": PODS - 1,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": stopped},
                {"action": "FailJob", "onExitCodes": refused},
            ]
        },
        # No second pod writes into the storage before the first has ended.
        "podReplacementPolicy": "Failed",
        "template": with_pod_defaults(pods, inputs.cluster.pod_defaults),
    }


def _pod(inputs: SFTGiven, profile: Profile) -> Object:
    cluster, image = inputs.cluster, inputs.cluster.images.learner[profile.image]
    claims = claims_in(preparation(inputs.job))
    spec: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": support_name(inputs.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(profile),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "initContainers": [preparing(image, "sft", cluster, inputs.secret, claims)],
        "containers": [_container(inputs, image, profile, claims)],
        "volumes": [
            {"name": "settings", "configMap": {"name": support_name(inputs.name)}},
            {"name": "home", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            *device_volumes(profile),
            *claim_volumes(claims),
            *storage_volumes(inputs.secret),
        ],
        **placement(cluster, profile),
    }
    return spec if profile.runtime_class is None else {**spec, "runtimeClassName": profile.runtime_class}


def _container(inputs: SFTGiven, image: str, profile: Profile, claims: list[str]) -> Object:
    plain: Mapping[str, str] = {**TORCH_DEFAULTS, "HOME": "/tmp"}  # noqa: S108
    spec: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": inputs.cluster.images.pull_policy,
        "command": under_init(profile, "python", "-m", "kestrl_learner.sft"),
        "args": ["--settings", f"{SETTINGS}/sft.json", "--result", RESULT],
        "env": [*({"name": name, "value": value} for name, value in plain.items()), *profile.environment()],
        "securityContext": container_security(profile),
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *device_mounts(profile),
            *claimed(claims),
        ],
        "terminationMessagePath": RESULT,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    devices = profile.requests(accelerator_of(inputs.job).count)
    return {**with_storage(spec, inputs.secret), "resources": resources_of("learner", inputs.cluster, devices)}


def _labels(job: str) -> dict[str, str]:
    """The labels recommended by Kubernetes. Without managed-by: by that, objects of an AgentRLJob are watched, and one
    of this name may exist.
    """
    return {
        "app.kubernetes.io/name": "kestrl",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": "kestrl",
        "app.kubernetes.io/component": "sft",
        SFT_LABEL: job,
    }


def _object(inputs: SFTGiven, api: str, kind: str, name: str, **content: object) -> Object:
    metadata: Object = {
        "name": name,
        "namespace": inputs.namespace,
        "labels": _labels(inputs.name),
        "ownerReferences": [owner(SFT_KIND, inputs.name, inputs.uid)],
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
