"""What the operator writes of a job, from what it observed.

Only its life is read again: that it has ended (`Succeeded`, `finishedAt`), that it was suspended, and since when it runs (`startedAt`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kestrl.spec.model import Model

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, as Kubernetes writes it."""


class Condition(Model):
    """One thing that is true, false or not known of the job, as Kubernetes has conditions."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    """From the closed list in docs/conditions.md."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """For people: what is wrong and what to do."""
    observed_generation: int = 0
    """The generation of the spec that this was seen for."""
    last_transition_time: Time


class PolicyStatus(Model):
    """One policy version."""

    version: str
    """Its name, such as email-search.14.1f0c2a9b7d3e."""
    parent: str | None = None
    """The version it was trained from."""
    step: int
    sha256: str
    uri: str | None = None
    converged_at: Time | None = None
    """When every engine had proved it."""


class ResultStatus(Model):
    """The adapter that a job ended with, as `summary.json` names it."""

    version: str
    sha256: str
    uri: str


class EngineStatus(Model):
    """One engine, as its agent told."""

    name: str
    version: str | None = None
    """The newest version that it has proved."""
    lag: int = 0
    """Steps behind the newest published version."""
    state: str = ""
    message: str = ""
    """Why it is behind, if it is."""


class ProgressStatus(Model):
    """How far the learner is, as it told."""

    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    """Mean over the last episodes."""
    answer_correct: float | None = None
    episodes_per_second: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: int | None = None
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """By boundary/code."""


class Shown(Model):
    """What `kubectl get` prints: derived, never branched on."""

    phase: str = ""
    step: str = ""
    """Such as 14/40."""
    policy: str = ""
    """Such as v14."""
    converged: str = ""
    """Engines that have proved the newest version, such as 2/2."""
    lag: int = 0
    """Steps that the engine furthest behind lags."""
    reward: str = ""


class JobStatus(Model):
    """The status of an AgentRLJob."""

    observed_generation: int = 0
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = Field(default_factory=list[Condition])
    shown: Shown = Shown()
    progress: ProgressStatus = ProgressStatus()
    policy: PolicyStatus | None = None
    """The newest version that every engine has proved."""
    result: ResultStatus | None = None
    """The adapter of a job that has succeeded. Of the last version nobody waits for every engine's proof: `policy` may be older."""
    history: Annotated[list[PolicyStatus], Field(max_length=10)] = Field(default_factory=list[PolicyStatus])
    """The last versions, newest first."""
    engines: Annotated[
        list[EngineStatus],
        Field(
            max_length=256, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = Field(default_factory=list[EngineStatus])
    rollout_replicas: int = 0
    """Observed, for the scale subresource."""
    rollout_selector: str = ""
    started_at: Time | None = None
    finished_at: Time | None = None
    restarts: int = 0
    """Of the whole job, against its back-off."""
