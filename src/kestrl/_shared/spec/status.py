"""Status of an AgentRLJob and of an SFTJob, as observed by the operator.

The operator only reads back the lifecycle: whether the job has ended (`Succeeded`, `finishedAt`), was suspended, and
when it started (`startedAt`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kestrl._shared.spec.model import Model

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""Time in RFC 3339, as in Kubernetes."""


class Condition(Model):
    """A Kubernetes condition: true, false or unknown."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    """Reason from the closed list in docs/conditions.md."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Human-readable message: what is wrong and how to fix it."""
    observed_generation: int = 0
    """Generation of the spec for which the condition was observed."""
    last_transition_time: Time


Conditions = Annotated[
    list[Condition],
    Field(max_length=24, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


class PolicyStatus(Model):
    """A policy version."""

    version: str
    """Name of the version, such as email-search.14.1f0c2a9b7d3e."""
    parent: str | None = None
    """Version from which it was trained."""
    step: int
    sha256: str
    uri: str | None = None
    converged_at: Time | None = None
    """Time at which every engine had verified it."""


class ResultStatus(Model):
    """Final adapter or model of a job, as in `summary.json`."""

    version: str
    sha256: str
    uri: str


class EngineStatus(Model):
    """An engine, as reported by its agent."""

    name: str
    version: str | None = None
    """Newest version that the engine has verified."""
    lag: int | None = None
    """Steps behind the newest published version; absent if the engine has verified none."""
    state: str = ""
    message: str = ""
    """Why the engine is behind, if it is."""


class SandboxStatus(Model):
    """The sandbox in which a tool runs code, as the tool service found it on its node."""

    tool: str
    """Name of the tool."""
    backend: str
    """Name of the back-end, such as zygote."""
    isolation: str
    """What isolates the code, such as namespaces."""


class ProgressStatus(Model):
    """Progress reported by the learner."""

    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    """Mean reward of the last episodes."""
    answer_correct: float | None = None
    episodes_per_second: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: int | None = None
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Failures by boundary/code."""


class Shown(Model):
    """Columns of `kubectl get`, derived from other fields, in this order."""

    phase: str = ""
    step: str = ""
    """Step and total, such as 14/40."""
    policy: str = ""
    """Policy version, such as v14."""
    converged: str = ""
    """Engines that have verified the newest version, such as 2/2."""
    lag: int | None = None
    """Lag of the slowest engine in steps, of those that have verified a version; absent if none has."""
    reward: str = ""
    idle: str = ""
    """Shares of the last step in which the learner waited and engines had no request, such as 41%/55%."""
    reason: str = ""
    """Why it is not as it should be; empty while it is."""


def shown_columns() -> list[tuple[str, str]]:
    """Name and JSON type of each column of `kubectl get`."""
    return [(name, "string" if field.annotation is str else "integer") for name, field in Shown.model_fields.items()]


class CrashStatus(Model):
    """The last failure of a container of the learner, which outlives its pod."""

    pod: str
    container: str
    reason: str
    code: int
    at: Time
    log: str = ""
    """Its last lines."""


class RestStatus(Model):
    """A time without pods of a job that could not start."""

    generation: int
    since: Time
    """When the first since it last trained began."""
    until: Time
    times: int
    why: str


class JobStatus(Model):
    """The status of an AgentRLJob."""

    observed_generation: int = 0
    conditions: Conditions = Field(default_factory=list[Condition])
    shown: Shown = Shown()
    progress: ProgressStatus = ProgressStatus()
    policy: PolicyStatus | None = None
    """Newest version that every engine has verified; that of the result, once the job has succeeded."""
    result: ResultStatus | None = None
    """Adapter of a succeeded job."""
    history: Annotated[list[PolicyStatus], Field(max_length=10)] = Field(default_factory=list[PolicyStatus])
    """Last versions, newest first."""
    engines: Annotated[
        list[EngineStatus],
        Field(
            max_length=256, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = Field(default_factory=list[EngineStatus])
    sandboxes: Annotated[
        list[SandboxStatus],
        Field(
            max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["tool"]}
        ),
    ] = Field(default_factory=list[SandboxStatus])
    """Sandboxes of tools that run code, as last reported."""
    rollout_replicas: int = 0
    """Observed number of workers, for the scale subresource."""
    rollout_selector: str = ""
    started_at: Time | None = None
    finished_at: Time | None = None
    restarts: int = 0
    """Restarts of the job that count towards `backoffLimit`."""
    installation: str | None = None
    """Installation of the operator that reconciles this job: namespace and name of its Lease."""
    last_crash: CrashStatus | None = None
    rest: RestStatus | None = None
    """The present or last time without pods, until the job trains."""


class SFTShown(Model):
    """Columns of `kubectl get`, derived from other fields."""

    phase: str = ""


class SFTJobStatus(Model):
    """The status of an SFTJob."""

    observed_generation: int = 0
    conditions: Conditions = Field(default_factory=list[Condition])
    shown: SFTShown = SFTShown()
    result: ResultStatus | None = None
    """Result of a succeeded job: `model.adapter.from` of an AgentRLJob takes the `uri` of an adapter, and `model.base`
    that of a model."""
    started_at: Time | None = None
    finished_at: Time | None = None
    restarts: int = 0
    """Pods that failed and were replaced."""
    installation: str | None = None
    """Installation of the operator that reconciles this job: namespace and name of its Lease."""
