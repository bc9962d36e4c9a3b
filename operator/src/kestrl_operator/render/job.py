"""All objects of a job, in the order in which they are applied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import ParseResult, urlparse

from kestrl._shared.plan.agents import pods_image
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.environments import stepped_environment
from kestrl._shared.plan.planning import has_rank_pods
from kestrl._shared.plan.tools import sandbox_claim
from kestrl._shared.prepare import OBJECT_SCHEMES, DataSource, PrepareSettings
from kestrl._shared.spec.job import API_VERSION, AgentRLJob
from kestrl_operator.render import network
from kestrl_operator.render.environments import PACKAGED, with_environment
from kestrl_operator.render.files import claims, file_sources, with_files
from kestrl_operator.render.identity import metadata_egress, with_identity
from kestrl_operator.render.patching import PodPatch, patched
from kestrl_operator.render.pod_defaults import with_cache, with_model, with_placement, with_pod_defaults
from kestrl_operator.render.pods import (
    STORAGE_ROLES,
    UNPREPARED,
    Object,
    account,
    checksum,
    container,
    credentials,
    program,
    settings_map,
    template,
)
from kestrl_operator.render.resources import within_limits
from kestrl_operator.render.stopping import grace_seconds, with_drain
from kestrl_operator.render.tracking import strategy, with_tracking
from kestrl_operator.state.accelerators import Placement, Profile
from kestrl_operator.state.cluster import (
    DATA,
    MODEL,
    PACKAGES,
    engines_moved,
    prepared,
    replicas,
    runtime_class_of,
    workload,
)
from kestrl_operator.state.snapshot import (
    ACCEPTED,
    ATTEMPTS,
    FORGIVEN,
    QUEUE_LABEL,
    RENDERED,
    RESTARTS,
    STATE,
    STORAGE,
    UID_LABEL,
)

if TYPE_CHECKING:
    from kestrl_operator.state.chart_values import Cluster, ServiceAccount

SETTINGS_DIGEST = "kestrl.dev/settings"
CREDENTIALS_DIGEST = "kestrl.dev/credentials"
AGENT_PACKAGES = ("kestrl", "kestrl_rollout")
"""What runs an agent in the user's image."""
STATEFUL = (Role.INFERENCE, Role.FILES, Role.RANKS, Role.LEARNER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The inputs of rendering."""

    job: AgentRLJob
    namespace: str
    uid: str
    """Uid of the job object, which owns all objects, so that Kubernetes deletes them with it."""
    components: Sequence[Component]
    cluster: Cluster
    secrets: Mapping[str, str] = field(repr=False)
    """Credentials by variable."""
    storage: str
    """Storage of the runs. Recorded beside the learner's state, so that a run never restarts from nothing elsewhere."""
    store: str | None = None
    """The Secret with the object storage's credentials."""
    identity: ServiceAccount | None = None
    """The ServiceAccount whose cloud identity reaches the object storage."""
    parked: bool = False
    """Whether no pod is to run: suspended, or ended."""
    attempts: int = 0
    """Restarts of the learner after a failure."""
    restarts: int = 0
    """Restarts of the whole job."""
    forgiven: int = 0
    """Attempts that no longer count."""
    accepted: str = ""
    """The rendered spec as JSON, recorded in case a later spec is invalid."""
    queue: str | None = None
    """Queue in which each workload asks Kueue for quota by itself; None where the job asks for all, or for none."""
    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles with pods in this job."""
        return network.roles_of(self.job.spec)

    def of(self, role: Role) -> list[Component]:
        return [component for component in self.components if component.role is role]

    def profile(self, role: Role) -> Profile:
        """The accelerator profile of a role's pods."""
        spec = self.job.spec
        if role in {Role.ENGINE, Role.INFERENCE}:
            return self.cluster.profile(spec.inference.accelerator.profile)
        if program(role) is not Role.LEARNER:
            return self.cluster.profile("cpu")
        profile = self.cluster.profile(spec.learner.accelerator.profile)
        return profile.of_several_pods() if has_rank_pods(spec) else profile

    def image(self, role: Role) -> str:
        """The image of a role's container."""
        images, build = self.cluster.images, self.profile(role).image
        by_role = {
            Role.INFERENCE: images.agent,
            Role.ROLLOUT: images.rollout,
            Role.FILES: images.rollout,
            Role.MLFLOW: images.rollout,
            Role.TOOLS: images.tools,
            Role.JUDGE: images.judge,
        }
        if role in by_role:
            return by_role[role]
        if role is Role.AGENT:
            image = pods_image(self.job.spec)
            assert image is not None
            return image
        if role is Role.ENGINE:
            return images.engines(self.job.spec.inference.engine)[1][build]
        return images.learner[build]


SANDBOXED = frozenset({Role.TOOLS, Role.AGENT})
"""Roles that run the code of others, under a RuntimeClass if the job or the cluster names one."""


def render(inputs: Given) -> list[Object]:
    """Every object of the job, with owner and labels; the learner's StatefulSet last, with the digest of all.

    Raises:
        UserInputError: A patch of the manifest changes a field that jobs must not change.
    """
    settings = all_settings(inputs)
    objects: list[Object] = [
        _object(inputs, "v1", "Secret", credentials(inputs.name), type="Opaque", stringData=dict(inputs.secrets)),
        _object(inputs, "v1", "ConfigMap", settings_map(inputs.name), data=settings),
        # It has no rights, and its token is not mounted.
        _object(inputs, "v1", "ServiceAccount", account(inputs.name), automountServiceAccountToken=False),
    ]
    if inputs.cluster.network_policies:
        # Before any pod, so that no pod ever runs without its policy.
        objects += [
            _object(inputs, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)
            for name, spec in network.policies(
                inputs.name,
                inputs.job.spec,
                inputs.cluster.egress_ports,
                inputs.cluster.api_server,
                inputs.cluster.engine_metrics_from,
                {role: metadata_egress(inputs.identity) for role in inputs.roles if uses_storage(inputs.job, role)},
            )
        ]
    for role in inputs.roles:
        objects += _of_role(inputs, role)
    for role in inputs.roles:
        objects.append(_workload(inputs, role, settings))
    annotations = {
        ATTEMPTS: str(inputs.attempts),
        RESTARTS: str(inputs.restarts),
        FORGIVEN: str(inputs.forgiven),
        STORAGE: inputs.storage,
        STATE: inputs.cluster.learner_state.model_dump_json(exclude_none=True),
        ACCEPTED: inputs.accepted,
    }
    objects[-1]["metadata"]["annotations"] = annotations
    objects[-1]["metadata"]["annotations"] = {**annotations, RENDERED: digest(objects)}
    return objects


def digest(objects: Sequence[Object]) -> str:
    """Digest of all objects: it identifies what was applied last without reading the objects."""
    return hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()[:32]


def all_settings(inputs: Given) -> dict[str, str]:
    """Every file of the ConfigMap: the settings of each role, which its replicas share, and of the preparation in each
    pod.
    """
    files: dict[str, str] = {}
    for component in inputs.components:
        if component.settings is not None:
            files[f"{component.role}.json"] = component.settings.model_dump_json(indent=2)
    for role in (role for role in inputs.roles if role not in UNPREPARED):
        reads = with_cache(preparation(inputs.job, role), inputs.cluster)
        files[f"prepare-{role}.json"] = reads.model_dump_json(indent=2)
    return files


def preparation(job: AgentRLJob, role: Role) -> PrepareSettings:
    """What the pods of a role prepare: the model where it or its tokenizer is loaded, data where it is trained on or
    searched.

    Tools search the data that prompts are generated from, or files in a volume; they cannot reach object storage.
    """
    spec = job.spec
    sets = {"train": spec.data.train, "validation": spec.data.validation}
    data = tuple(
        DataSource(uri=item.uri, size=item.size, target=prepared(name, item.uri), field=f"spec.data.{name}.uri")
        for name, item in sets.items()
        if item is not None
    )
    local_sources = tuple(source for source in data if urlparse(source.uri).scheme not in OBJECT_SCHEMES)
    template = spec.agent.template
    if role is Role.AGENT:
        return PrepareSettings(packages=AGENT_PACKAGES, packages_target=PACKAGES)
    if role is Role.FILES:
        return PrepareSettings(files=file_sources(spec), fetches=True)
    if role is Role.MLFLOW:
        return PrepareSettings()
    return PrepareSettings(
        model=None if role in {Role.TOOLS, Role.JUDGE} else spec.model.base,
        model_target=MODEL,
        model_weights=role is not Role.ROLLOUT,
        data=data if role is Role.LEARNER else local_sources if role is Role.TOOLS else (),
        data_dir=DATA,
        seed=spec.data.seed,
        template=template.uri if template is not None and role is Role.ROLLOUT else None,
        template_target=f"{DATA}/template.jinja",
        files=file_sources(spec) if role is Role.TOOLS else (),
        packages=PACKAGED if role is Role.TOOLS and stepped_environment(spec) is not None else (),
        packages_target=PACKAGES,
    )


def _workload(inputs: Given, role: Role, settings: Mapping[str, str]) -> Object:
    kind, name = "StatefulSet" if role in STATEFUL else "Deployment", workload(inputs.name, role)
    workload_object = _object(inputs, "apps/v1", kind, name, spec=_workload_spec(inputs, role, settings))
    queued = {} if inputs.queue is None else {QUEUE_LABEL: inputs.queue}
    workload_object["metadata"]["labels"] = {**labels(inputs.name, role), **queued}
    return workload_object


def _of_role(inputs: Given, role: Role) -> Iterator[Object]:
    if role is Role.MLFLOW:
        return  # nobody calls it
    name = workload(inputs.name, role)
    several = replicas(inputs.job.spec, {})[role] > 1
    yield _object(inputs, "v1", "Service", name, spec=network.service(inputs.name, role, sticky=several))
    # For a role with one pod, a budget would block a node's drain forever, or have no effect.
    if role in {Role.INFERENCE, Role.ROLLOUT, Role.AGENT} or (role is Role.TOOLS and several):
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that loads or crashes does not block a node's drain
            "selector": {"matchLabels": network.selector(inputs.name, role)},
        }
        yield _object(inputs, "policy/v1", "PodDisruptionBudget", name, spec=budget)


def _workload_spec(inputs: Given, role: Role, settings: Mapping[str, str]) -> Object:
    profile, selector = inputs.profile(role), network.selector(inputs.name, role)
    mounted = claims_of(inputs.job, role)
    parts = [component for kind in _inside(role) for component in inputs.of(kind)[:1]]
    containers = [with_drain(_container(inputs, part, mounted), part, inputs.job.spec) for part in parts]
    files = {name: settings[name] for name in (f"{role}.json", f"prepare-{role}.json") if name in settings}
    pods = template(
        inputs.name,
        role,
        containers,
        cluster=inputs.cluster,
        profile=profile,
        labels={**labels(inputs.name, role), **selector, UID_LABEL: inputs.uid},
        annotations=_annotations(inputs, role, files),
        store=inputs.store if role in network.EGRESS_ROLES else None,
        claims=mounted,
        entries={name: entry for part in parts for name, entry in part.user_secrets.items()},
        runtime_class=runtime_class_of(inputs.job, role, inputs.cluster)
        if role in SANDBOXED
        else profile.runtime_class,
        preparing_image=inputs.image(Role.ROLLOUT if role is Role.AGENT else role),
        claims_sandboxes=role is Role.TOOLS and sandbox_claim(inputs.job.spec) is not None,
        grace=grace_seconds(inputs.job.spec, role),
    )
    pods = with_environment(pods, role, inputs.job.spec, inputs.cluster)
    pods = with_tracking(with_files(pods, role, inputs.job), role, inputs.job.spec)
    pods = with_model(pods, preparation(inputs.job, role), inputs.cluster, inputs.namespace, queued=bool(inputs.queue))
    if inputs.identity is not None and uses_storage(inputs.job, role):
        users = [str(program(part.role)) for part in parts if part.role in STORAGE_ROLES]
        pods = with_identity(pods, inputs.identity, users)
    patched_pods = patched(with_pod_defaults(pods, inputs.cluster.pod_defaults), _patches(inputs.job, role))
    spec: Object = {
        **_replicas(inputs, role),
        "selector": {"matchLabels": selector},
        "template": within_limits(with_placement(patched_pods, inputs.placements.get(role))),
    }
    if role in STATEFUL:
        spec |= {"serviceName": workload(inputs.name, role), "podManagementPolicy": "Parallel"}
    spec |= claims(inputs.job.spec, role, inputs.cluster) | strategy(role)
    return spec


def _container(inputs: Given, part: Component, mounted: Sequence[str]) -> Object:
    profile = inputs.cluster.profile("cpu") if part.role is Role.INFERENCE else inputs.profile(part.role)
    return container(inputs.name, part, inputs.image(part.role), inputs.cluster, profile, inputs.store, mounted)


def uses_storage(job: AgentRLJob, role: Role) -> bool:
    """Whether a program in the pods of a role reads or writes object storage: its own, or `prepare` before it."""
    schemes = (address.scheme for address in _addresses(preparation(job, role)))
    return role in STORAGE_ROLES or any(scheme in OBJECT_SCHEMES for scheme in schemes)


def _replicas(inputs: Given, role: Role) -> Object:
    """The number of a role's pods; nothing where others move it."""
    if inputs.parked:
        return {"replicas": 0}
    moved = role is Role.INFERENCE and engines_moved(inputs.job.spec)
    return {} if moved else {"replicas": replicas(inputs.job.spec, {}).get(role, 1)}


def _annotations(inputs: Given, role: Role, files: Mapping[str, str]) -> dict[str, str]:
    """The annotations that roll the pods of a role: digests of what they read, restarts of the job, and attempts of the
    learner.
    """
    annotations = {SETTINGS_DIGEST: checksum(files), RESTARTS: str(inputs.restarts)}
    if role not in {Role.AGENT, Role.MLFLOW}:  # their pods hold no credential of the job
        annotations[CREDENTIALS_DIGEST] = checksum(inputs.secrets)
    return {**annotations, ATTEMPTS: str(inputs.attempts)} if role is Role.LEARNER else annotations


def _patches(job: AgentRLJob, role: Role) -> list[PodPatch]:
    return [
        PodPatch(f"spec.patches[{index}]", patch.template, patch.remove)
        for index, patch in enumerate(job.spec.patches)
        if patch.role == program(role).value
    ]


def claims_of(job: AgentRLJob, role: Role) -> list[str]:
    """The claims that a role's pods mount, from the pvc:// addresses that the role reads."""
    return claims_in(preparation(job, role))


def claims_in(reads: PrepareSettings) -> list[str]:
    """The claims of pvc:// addresses, sorted."""
    return sorted({address.netloc for address in _addresses(reads) if address.scheme == "pvc"})


def _addresses(reads: PrepareSettings) -> list[ParseResult]:
    fetched = [item.address for item in reads.files] if reads.fetches else []
    addresses = [reads.model, reads.template, *(item.uri for item in reads.data), *fetched]
    return [urlparse(address) for address in addresses if address]


def _inside(role: Role) -> tuple[Role, ...]:
    return (Role.ENGINE, Role.INFERENCE) if role is Role.INFERENCE else (role,)


def labels(job: str, role: Role | None = None) -> dict[str, str]:
    """The labels recommended by Kubernetes."""
    common = {
        "app.kubernetes.io/name": "kestrl",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "kestrl-operator",
        "app.kubernetes.io/part-of": "kestrl",
    }
    return common if role is None else {**common, "app.kubernetes.io/component": str(role)}


def _object(inputs: Given, api: str, kind: str, name: str, **content: object) -> Object:
    owners = [owner(inputs.job.kind, inputs.name, inputs.uid)]
    metadata = {"name": name, "namespace": inputs.namespace, "labels": labels(inputs.name), "ownerReferences": owners}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def owner(kind: str, name: str, uid: str) -> Object:
    """The owner reference of a job's objects."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,  # a stopped operator must not block a deletion
    }
