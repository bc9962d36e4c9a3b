"""All objects of a job, in the order in which they are applied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import ParseResult, urlparse

from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.planning import has_rank_pods
from kestrl._shared.plan.tools import sandbox_claim
from kestrl._shared.prepare import OBJECT_SCHEMES, DataSource, PrepareSettings
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.job import API_VERSION
from kestrl_operator.render import network
from kestrl_operator.render.environments import PACKAGED, with_environment
from kestrl_operator.render.files import claims, file_sources, with_files
from kestrl_operator.render.identity import metadata_egress, with_identity
from kestrl_operator.render.patching import PodPatch, patched
from kestrl_operator.render.pod_defaults import with_pod_defaults
from kestrl_operator.render.pods import (
    STORAGE_ROLES,
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
from kestrl_operator.state.accelerators import Profile
from kestrl_operator.state.cluster import (
    DATA,
    MODEL,
    PACKAGES,
    Cluster,
    ServiceAccount,
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
    """Kueue queue of the pods."""

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
            Role.TOOLS: images.tools,
            Role.JUDGE: images.judge,
        }
        if role in by_role:
            return by_role[role]
        if role is Role.AGENT:
            assert self.job.spec.agent.image is not None
            return self.job.spec.agent.image
        if role is Role.ENGINE:
            return images.engines(self.job.spec.inference.engine)[1][build]
        return images.learner[build]


SANDBOXED = frozenset({Role.TOOLS, Role.AGENT})
"""Roles that run the code of others, under a RuntimeClass if the job or the cluster names one."""


def render(given: Given) -> list[Object]:
    """Every object of the job, with owner and labels; the learner's StatefulSet last, with the digest of all.

    Raises:
        UserInputError: A patch of the manifest changes a field that jobs must not change.
    """
    settings = all_settings(given)
    objects: list[Object] = [
        _object(given, "v1", "Secret", credentials(given.name), type="Opaque", stringData=dict(given.secrets)),
        _object(given, "v1", "ConfigMap", settings_map(given.name), data=settings),
        # It has no rights, and its token is not mounted.
        _object(given, "v1", "ServiceAccount", account(given.name), automountServiceAccountToken=False),
    ]
    if given.cluster.network_policies:
        # Before any pod, so that no pod ever runs without its policy.
        objects += [
            _object(given, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)
            for name, spec in network.policies(
                given.name,
                given.job.spec,
                given.cluster.egress_ports,
                given.cluster.api_server,
                given.cluster.engine_metrics_from,
                {role: metadata_egress(given.identity) for role in given.roles if uses_storage(given.job, role)},
            )
        ]
    for role in given.roles:
        objects += _of_role(given, role)
    for role in given.roles:
        objects.append(_workload(given, role, settings))
    kept = {
        ATTEMPTS: str(given.attempts),
        RESTARTS: str(given.restarts),
        FORGIVEN: str(given.forgiven),
        STORAGE: given.storage,
        STATE: given.cluster.learner_state.model_dump_json(exclude_none=True),
        ACCEPTED: given.accepted,
    }
    objects[-1]["metadata"]["annotations"] = kept
    objects[-1]["metadata"]["annotations"] = {**kept, RENDERED: digest(objects)}
    return objects


def digest(objects: Sequence[Object]) -> str:
    """Digest of all objects: it identifies what was applied last without reading the objects."""
    return hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()[:32]


def all_settings(given: Given) -> dict[str, str]:
    """Every file of the ConfigMap: the settings of each role, which its replicas share, and of the preparation in each
    pod.
    """
    files: dict[str, str] = {}
    for component in given.components:
        if component.settings is not None:
            files[f"{component.role}.json"] = component.settings.model_dump_json(indent=2)
    for role in given.roles:
        if role is not Role.JUDGE:
            files[f"prepare-{role}.json"] = preparation(given.job, role).model_dump_json(indent=2)
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
    near = tuple(source for source in data if urlparse(source.uri).scheme not in OBJECT_SCHEMES)
    template = spec.agent.template
    if role is Role.AGENT:
        return PrepareSettings(packages=AGENT_PACKAGES, packages_target=PACKAGES)
    if role is Role.FILES:
        return PrepareSettings(files=file_sources(spec), fetches=True)
    return PrepareSettings(
        model=None if role in {Role.TOOLS, Role.JUDGE} else spec.model.base,
        model_target=MODEL,
        data=data if role is Role.LEARNER else near if role is Role.TOOLS else (),
        data_dir=DATA,
        seed=spec.data.seed,
        template=template.uri if template is not None and role is Role.ROLLOUT else None,
        template_target=f"{DATA}/template.jinja",
        files=file_sources(spec) if role is Role.TOOLS else (),
        packages=PACKAGED if role is Role.TOOLS and spec.environment is not None else (),
        packages_target=PACKAGES,
    )


def _workload(given: Given, role: Role, settings: Mapping[str, str]) -> Object:
    kind, name = "StatefulSet" if role in STATEFUL else "Deployment", workload(given.name, role)
    made = _object(given, "apps/v1", kind, name, spec=_workload_spec(given, role, settings))
    made["metadata"]["labels"] = {**labels(given.name, role), **_queued(given)}
    return made


def _queued(given: Given) -> dict[str, str]:
    return {} if given.queue is None else {QUEUE_LABEL: given.queue}


def _of_role(given: Given, role: Role) -> Iterator[Object]:
    name = workload(given.name, role)
    several = replicas(given.job.spec, {})[role] > 1
    yield _object(given, "v1", "Service", name, spec=network.service(given.name, role, sticky=several))
    # For a role with one pod, a budget would block a node's drain forever, or have no effect.
    if role in {Role.INFERENCE, Role.ROLLOUT, Role.AGENT} or (role is Role.TOOLS and several):
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a pod that loads or crashes does not block a node's drain
            "selector": {"matchLabels": network.selector(given.name, role)},
        }
        yield _object(given, "policy/v1", "PodDisruptionBudget", name, spec=budget)


def _workload_spec(given: Given, role: Role, settings: Mapping[str, str]) -> Object:
    profile, selector = given.profile(role), network.selector(given.name, role)
    mounted = claims_of(given.job, role)
    parts = [component for kind in _inside(role) for component in given.of(kind)[:1]]
    containers = [with_drain(_container(given, part, mounted), part, given.job.spec) for part in parts]
    read = {name: settings[name] for name in (f"{role}.json", f"prepare-{role}.json") if name in settings}
    pods = template(
        given.name,
        role,
        containers,
        cluster=given.cluster,
        profile=profile,
        labels={**labels(given.name, role), **selector, UID_LABEL: given.uid},
        annotations=_annotations(given, role, read),
        store=given.store if role in network.EGRESS_ROLES else None,
        claims=mounted,
        entries={name: entry for part in parts for name, entry in part.user_secrets.items()},
        runtime_class=runtime_class_of(given.job, role, given.cluster) if role in SANDBOXED else profile.runtime_class,
        preparing_image=given.image(Role.ROLLOUT if role is Role.AGENT else role),
        claims_sandboxes=role is Role.TOOLS and sandbox_claim(given.job.spec) is not None,
        grace=grace_seconds(given.job.spec, role),
    )
    environment = given.job.spec.environment
    if role is Role.TOOLS and environment is not None:
        pods = with_environment(pods, environment, given.cluster)
    if role in {Role.FILES, Role.TOOLS} and given.job.spec.data.files:
        pods = with_files(pods, given.name, role)
    if given.identity is not None and uses_storage(given.job, role):
        users = [str(program(part.role)) for part in parts if part.role in STORAGE_ROLES]
        pods = with_identity(pods, given.identity, users)
    defaulted = with_pod_defaults(pods, given.cluster.pod_defaults)
    spec: Object = {
        **_replicas(given, role),
        "selector": {"matchLabels": selector},
        "template": within_limits(patched(defaulted, _patches(given.job, role))),
    }
    if role in STATEFUL:
        spec |= {"serviceName": workload(given.name, role), "podManagementPolicy": "Parallel"}
    spec |= claims(given.job.spec, role, given.cluster)
    return spec


def _container(given: Given, part: Component, mounted: Sequence[str]) -> Object:
    profile = given.cluster.profile("cpu") if part.role is Role.INFERENCE else given.profile(part.role)
    return container(given.name, part, given.image(part.role), given.cluster, profile, given.store, mounted)


def uses_storage(job: AgentRLJob, role: Role) -> bool:
    """Whether a program in the pods of a role reads or writes object storage: its own, or `prepare` before it."""
    read = (address.scheme for address in _addresses(preparation(job, role)))
    return role in STORAGE_ROLES or any(scheme in OBJECT_SCHEMES for scheme in read)


def _replicas(given: Given, role: Role) -> Object:
    """The number of a role's pods; nothing where others move it."""
    if given.parked:
        return {"replicas": 0}
    moved = role is Role.INFERENCE and engines_moved(given.job.spec)
    return {} if moved else {"replicas": replicas(given.job.spec, {})[role]}


def _annotations(given: Given, role: Role, read: Mapping[str, str]) -> dict[str, str]:
    """The annotations that roll the pods of a role: digests of what they read, restarts of the job, and attempts of the
    learner.
    """
    made = {SETTINGS_DIGEST: checksum(read), RESTARTS: str(given.restarts)}
    if role is not Role.AGENT:  # its pods hold no credential
        made[CREDENTIALS_DIGEST] = checksum(given.secrets)
    return {**made, ATTEMPTS: str(given.attempts)} if role is Role.LEARNER else made


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


def _object(given: Given, api: str, kind: str, name: str, **content: object) -> Object:
    owners = [owner(given.job.kind, given.name, given.uid)]
    metadata = {"name": name, "namespace": given.namespace, "labels": labels(given.name), "ownerReferences": owners}
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
