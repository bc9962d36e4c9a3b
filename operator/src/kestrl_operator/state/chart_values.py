"""The chart's values that apply to jobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network, ip_network
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kestrl._shared.plan.servers import METADATA
from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.spec.scalars import Name
from kestrl._shared.spec.tools import Network
from kestrl.errors import UserInputError
from kestrl_operator.state.accelerators import Profile, profiles


class _Values(SettingsModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)


class Images(_Values):
    """Images of the pods. Engine and learner have one build per kind of device: `cpu`, `cuda`, `npu`."""

    engine: Mapping[str, str]
    """Those with vLLM."""
    sglang: Mapping[str, str] = {}
    """Those with SGLang."""
    learner: Mapping[str, str]
    agent: str
    rollout: str
    tools: str
    judge: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()

    def engines(self, engine: str) -> tuple[str, Mapping[str, str]]:
        """Name of the field with the images of an engine, and the images."""
        return ("sglang", self.sglang) if engine == "sglang" else ("engine", self.engine)


class LearnerState(_Values):
    """The learner's volume. It holds the ledger, unless a database is configured."""

    size: str = "1Gi"
    storage_class: str | None = None


class ModelCache(_Values):
    """The volume in which the pods of jobs share models that they download; none by default."""

    claim: Name | None = None
    """A PersistentVolumeClaim in the jobs' namespaces."""
    node_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")] | None = None
    """A folder of every node, in which each namespace has one of its own."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.claim is not None and self.node_path is not None:
            raise ValueError("give either claim or nodePath")
        return self


class DefaultStorage(_Values):
    """Object storage of the jobs that name none."""

    uri: Annotated[str, Field(pattern="^(s3|gs|az)://[^/]")] | None = None
    """s3://bucket/prefix, gs://..., az://...; each run gets a folder below it."""
    secret: str | None = None
    """A Secret in the job's namespace whose keys are the credentials' environment variables."""
    service_account: str | None = None
    """A ServiceAccount of `Cluster.service_accounts` whose cloud identity reaches it."""


class MetadataService(_Values):
    """A metadata service of nodes that pods may reach, against the rule that none may."""

    cidr: Annotated[Network, Field(max_length=18)]
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65_535)], ...], Field(min_length=1)]

    @field_validator("cidr")
    @classmethod
    def _is_one(cls, cidr: str) -> str:
        block = ip_network(cidr)
        if not isinstance(block, IPv4Network) or not any(block.subnet_of(IPv4Network(network)) for network in METADATA):
            raise ValueError(f"{cidr} is not within {', '.join(METADATA)}; other addresses are those of egressPorts")
        return cidr


RESERVED_PREFIXES = ("kestrl.dev/", "app.kubernetes.io/")
"""Prefixes of the labels and annotations by which the operator knows its objects."""


def _not_reserved(entries: Mapping[str, str]) -> Mapping[str, str]:
    for name in entries:
        if name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"{name} belongs to the operator; use another prefix")
    return entries


class ServiceAccount(_Values):
    """A ServiceAccount that jobs may name for its cloud identity."""

    name: Name
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs may name it; empty for all."""
    pod_labels: Mapping[str, str] = {}
    """Labels by which the cloud's webhook knows pods that use it."""
    metadata_services: tuple[MetadataService, ...] = ()
    """Metadata services from which such pods get their credentials."""

    @field_validator("pod_labels")
    @classmethod
    def _are_not_the_operators(cls, entries: Mapping[str, str]) -> Mapping[str, str]:
        return _not_reserved(entries)


class ApiServer(_Values):
    """The API server, as the NetworkPolicy of tool pods that claim sandboxes names it."""

    cidrs: tuple[Network, ...] = ("0.0.0.0/0",)
    """Blocks with its addresses: of its Service, and of its endpoints."""
    ports: tuple[int, ...] = (443, 6443)
    """Ports of its Service, and of its endpoints."""


ContainerName = Literal[
    "engine", "inference", "rollout", "agent", "tools", "files", "environment", "judge", "mlflow", "learner", "prepare"
]
"""Containers of a job's pods; those of an SFTJob are `learner` and `prepare`."""


class Variable(_Values):
    """An environment variable of containers: a `value`, or `valueFrom` as in a pod."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    value_from: Mapping[str, Any] | None = None
    containers: tuple[ContainerName, ...] = ()
    """Containers that get it; empty for all."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.value is None) is (self.value_from is None):
            raise ValueError("give either value or valueFrom")
        return self

    def as_kubernetes(self) -> dict[str, Any]:
        """The variable as a container has it."""
        source = {"value": self.value} if self.value_from is None else {"valueFrom": dict(self.value_from)}
        return {"name": self.name, **source}


class PodDefaults(_Values):
    """What the pods of every job have in addition to their own."""

    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class_name: str | None = None
    env: tuple[Variable, ...] = ()

    @field_validator("labels", "annotations")
    @classmethod
    def _are_not_the_operators(cls, entries: Mapping[str, str]) -> Mapping[str, str]:
        return _not_reserved(entries)


class Cluster(_Values):
    """The chart's values that apply to jobs."""

    images: Images
    storage: DefaultStorage = DefaultStorage()
    service_accounts: tuple[ServiceAccount, ...] = ()
    """Those that jobs may name for their cloud identity."""
    pod_defaults: PodDefaults = PodDefaults()
    resources: Mapping[ContainerName, Mapping[str, Any]] = {}
    """Requests and limits of each container, without devices, in place of the defaults; a job's `patches` override
    them."""
    accelerators: Mapping[str, Any] = {}
    learner_state: LearnerState = LearnerState()
    model_cache: ModelCache = ModelCache()
    tools_runtime_class: str | None = None
    """RuntimeClass of tool pods and of pods with a user's image, such as gvisor."""
    network_policies: bool = True
    egress_ports: tuple[int, ...] = (80, 443, 4317, 5432, 8080, 9000)
    """Ports of object storage, model hubs, databases and collectors; a job's pods reach nothing else outside the
    job."""
    engine_metrics_from: tuple[Mapping[str, Any], ...] = ()
    """Peers of a NetworkPolicy that may read the engines' own metrics."""
    api_server: ApiServer = ApiServer()
    domain: str = "svc"
    """Domain appended to a Service's name and namespace."""

    @model_validator(mode="after")
    def _lists_the_default_account(self) -> Self:
        default = self.storage.service_account
        if default is not None and default not in {account.name for account in self.service_accounts}:
            raise ValueError(f"storage.serviceAccount: {default} is not listed in serviceAccounts; add it there")
        return self

    def profile(self, name: str) -> Profile:
        """The accelerator profile of a name.

        Raises:
            UserInputError: There is none; the message lists the existing ones.
        """
        by_name = profiles(self.accelerators)
        if name not in by_name:
            raise UserInputError(f"accelerator.profile: {name!r} is not one of {', '.join(sorted(by_name))}")
        return by_name[name]


def read_cluster(values: Mapping[str, Any]) -> Cluster:
    """The settings in the chart's values.

    Raises:
        UserInputError: A value is invalid; the message names the field.
    """
    try:
        cluster = Cluster.model_validate(values)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserInputError(f"the operator's values: {details}") from error
    profiles(cluster.accelerators)
    return cluster
