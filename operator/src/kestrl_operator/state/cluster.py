"""A cluster as the site of a job: the addresses and folders of the job's components, and its storage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlparse

from kestrl._shared.plan.agents import AGENT_PORT, pods_image, pods_replicas
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.environments import stepped_environment
from kestrl._shared.plan.planning import has_rank_pods
from kestrl._shared.plan.settings.common import DNS
from kestrl._shared.plan.site import Build, EngineService, ReplicaEndpoint, Site
from kestrl._shared.plan.tools import runtime_class
from kestrl._shared.spec.job import AgentRLJob, JobSpec
from kestrl._shared.spec.scalars import PinnedFile
from kestrl._shared.spec.sft import SFTJob
from kestrl.errors import UserInputError
from kestrl_operator.state.accelerators import profiles
from kestrl_operator.state.chart_values import Cluster, ServiceAccount
from kestrl_operator.state.snapshot import Workload

GRPC_PORT, HTTP_PORT, METRICS_PORT, RANKS_PORT = 7000, 8000, 9464, 7100
SHARED_SCHEMES = frozenset({"s3", "gs", "az"})
HOME = "/kestrl"
"""The folder in every pod with what `prepare` downloaded and, in the learner's, its state. The same in every pod,
because data rows name files by path."""
MODEL, DATA, WORK, STATE, SETTINGS = (f"{HOME}/{name}" for name in ("model", "data", "work", "state", "settings"))
FILES = f"{HOME}/files"
"""Folder of the volume with the files that tools read."""


PACKAGES = f"{HOME}/packages"
"""Folder with our packages in pods with a user's image."""
PREPARE = "prepare"
"""Name of the init container that downloads model and data."""


def engines_moved(spec: JobSpec) -> bool:
    """Whether others than the operator say how many engines a job has, within its range."""
    return not spec.inference.replicas.fixed


def replicas(spec: JobSpec, workloads: Mapping[Role, Workload]) -> Mapping[Role, int]:
    """Pods that a running job needs, by role. Engines run in the pods of their agents.

    Args:
        spec: The job.
        workloads: Those that exist: with a range of engines the number is theirs.
    """
    engines = workloads.get(Role.INFERENCE)
    number = spec.inference.replicas.nearest(0 if engines is None else engines.replicas)
    single_pods = dict.fromkeys((Role.JUDGE, Role.LEARNER), 1)
    environment = stepped_environment(spec)
    tools = {Role.TOOLS: 1 if environment is None else environment.replicas}
    ranks = {Role.RANKS: spec.learner.replicas - 1} if has_rank_pods(spec) else {}
    agent = {} if pods_image(spec) is None else {Role.AGENT: pods_replicas(spec)}
    files = {Role.FILES: 1} if spec.data.files else {}
    return {
        Role.INFERENCE: number,
        Role.ROLLOUT: spec.rollout.replicas,
        **single_pods,
        **tools,
        **ranks,
        **agent,
        **files,
    }


def workload(job: str, role: Role) -> str:
    """The name of a role's workload and Service. Engines run in the pods of their agents."""
    return f"{job}-{Role.INFERENCE if role is Role.ENGINE else role}"


def prepared(name: str, uri: str) -> str:
    """The path of a data set in every pod. The suffix names its format."""
    return f"{DATA}/{name}.{'parquet' if uri.endswith('.parquet') else 'jsonl'}"


def placed_file(uri: str) -> str | None:
    """The path of a file that tools read; None for one that pods cannot reach."""
    pinned = PinnedFile.read(uri)
    return None if pinned is None else pinned.place(FILES)


def runtime_class_of(job: AgentRLJob, role: Role, cluster: Cluster) -> str | None:
    """The RuntimeClass of the pods with a job's tools, or with its agent; None for the node's default.

    Raises:
        UserInputError: The job names another one than the administrator has set for all tools.
    """
    job_class, set_for_all = runtime_class(job.spec, role), cluster.tools_runtime_class
    if job_class is None:
        return set_for_all
    if set_for_all not in {None, job_class[0]}:
        raise UserInputError(
            f"{job_class[1]}: is {job_class[0]}, and this cluster runs all tools under {set_for_all} (the chart's "
            "jobs.toolsRuntimeClass); remove it, or name that one"
        )
    return job_class[0]


def storage_of(job: AgentRLJob | SFTJob, cluster: Cluster) -> tuple[str, str | None]:
    """The storage of a job's runs, and the Secret with its credentials.

    Raises:
        UserInputError: Neither the job nor the cluster names storage that all of its pods can reach.
    """
    storage = job.spec.storage
    uri = storage.uri or cluster.storage.uri
    # A key of the cluster's Secret would be taken in place of the identity that the job names.
    is_own = storage.uri or storage.service_account
    secret = storage.secret_ref.name if storage.secret_ref else None if is_own else cluster.storage.secret
    if uri is None:
        raise UserInputError(
            "spec.storage.uri: is required, since this cluster has no default (the chart's jobs.storage.uri); name "
            "s3://BUCKET/PREFIX"
        )
    if urlparse(uri).scheme not in SHARED_SCHEMES:
        raise UserInputError(
            f"spec.storage.uri: {uri!r} is a place on one machine; on a cluster name s3://..., gs://... or az://..."
        )
    return uri, secret


def identity_of(job: AgentRLJob | SFTJob, namespace: str, cluster: Cluster) -> ServiceAccount | None:
    """The ServiceAccount by whose cloud identity a job reaches its storage; None if it has none.

    Raises:
        UserInputError: The administrator does not list it for jobs of this namespace.
    """
    storage = job.spec.storage
    name = storage.service_account or (None if storage.uri or storage.secret_ref else cluster.storage.service_account)
    if name is None:
        return None
    accounts = [
        candidate
        for candidate in cluster.service_accounts
        if not candidate.namespaces or namespace in candidate.namespaces
    ]
    for account in accounts:
        if account.name == name:
            return account
    allowed = ", ".join(account.name for account in accounts) or "none"
    raise UserInputError(
        f"spec.storage.serviceAccount: {name!r} is not one that jobs of namespace {namespace} may name; there are: "
        f"{allowed}. Name one of them, or have the administrator add it to the chart's jobs.serviceAccounts"
    )


def site_of(
    job: AgentRLJob, namespace: str, cluster: Cluster, *, run: str, storage: str, traceparent: str | None = None
) -> Site:
    """The addresses of a job's components on a cluster: pods of StatefulSets by pod name, others by Service name.

    Args:
        job: The job.
        namespace: Its namespace.
        cluster: The administrator's settings.
        run: Id of the run.
        storage: Object storage address of the run's folder.
        traceparent: W3C trace context of the run.
    """
    name = job.metadata.name

    def service(role: Role) -> str:
        return f"{workload(name, role)}.{namespace}.{cluster.domain}"

    def endpoint(role: Role, index: int) -> ReplicaEndpoint:
        by_pod = role in {Role.ENGINE, Role.INFERENCE, Role.LEARNER}
        host = f"{workload(name, role)}-{index}.{service(role)}" if by_pod else service(role)
        if role in {Role.AGENT, Role.ENGINE}:
            port = AGENT_PORT if role is Role.AGENT else HTTP_PORT
            return ReplicaEndpoint(bind="0.0.0.0", host=host, port=port)  # noqa: S104 - NetworkPolicy and keys protect it
        return ReplicaEndpoint(bind="0.0.0.0", host=host, port=GRPC_PORT, metrics_port=METRICS_PORT)  # noqa: S104 - as above

    template = job.spec.agent.template
    validation = job.spec.data.validation
    return Site(
        run=run,
        endpoint=endpoint,
        model=MODEL,
        template=f"{DATA}/template.jinja" if template and template.uri else None,
        train=prepared("train", job.spec.data.train.uri),
        validation=prepared("validation", validation.uri) if validation else None,
        storage=storage,
        files={file.uri: target for file in job.spec.data.files if (target := placed_file(file.uri)) is not None},
        database=f"sqlite:///{STATE}/ledger.db",
        work_dir=WORK,
        engine_python=job.spec.inference.python,
        builds={name: Build(profile.device) for name, profile in profiles(cluster.accelerators).items()},
        templates=True,
        keep_alive=True,
        ranks_port=RANKS_PORT,
        traceparent=traceparent,
        workers=(f"{DNS}{service(Role.ROLLOUT)}:{GRPC_PORT}",),
        engine_service=EngineService(service(Role.INFERENCE), GRPC_PORT, HTTP_PORT),
    )
