"""What each service is told when it starts: one model a service, written by `plan`, read by the service's `main`.

The local runner writes it to a file, a cluster to a ConfigMap; both pass `--settings PATH`. Secrets are never in it:
they are in the environment variables of `kestrl.credentials`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from kestrl.errors import UserInputError

REPLICA_VARIABLE = "KESTRL_REPLICA"
INDEX_VARIABLE = "KESTRL_INDEX"
"""The ordinal of an engine agent's pod."""
Settings = TypeVar("Settings", bound="ServiceSettings")


class Model(BaseModel):
    """Frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Read = TypeVar("Read", bound=Model)


def read_settings(kind: type[Read], path: Path) -> Read:
    """Reads a settings file.

    Raises:
        UserInputError: It is missing or not what this version expects.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: not readable as {kind.__name__}: {error}") from error


class ServiceSettings(Model):
    """What every service is told."""

    component: str
    """Its name with ordinal, such as `rollout-0`."""
    job: str
    run: str
    listen: str
    """`host:port` of its gRPC server."""
    python_path: tuple[str, ...] = ()
    """Folders put in front of `sys.path`: where a user's tools, rewards and agents lie."""
    otlp_endpoint: str | None = None
    """Where spans and metrics go; the standard OTEL_* variables also work."""
    metrics_listen: str | None = None
    """`host:port` of its Prometheus endpoint."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. Replicas that share one are told apart by KESTRL_REPLICA, a pod's name on a cluster.

        Raises:
            UserInputError: It is missing or not what this version expects.
        """
        settings = read_settings(cls, path)
        replica = os.environ.get(REPLICA_VARIABLE)
        role = settings.component.partition("-")[0]
        return settings.model_copy(update={"component": f"{role}-{replica}"}) if replica else settings


class ToolEntry(Model):
    """One tool or environment of the manifest."""

    name: str
    use: str
    """Import path of a function or class."""
    methods: tuple[str, ...] | None = None
    """Of an environment: its methods that are tools; None for all public ones, or for what is not an environment."""
    config: dict[str, Any] = {}


class ToolsSettings(ServiceSettings):
    """The tool service."""

    tools: tuple[ToolEntry, ...]
    call_seconds: float
    """Deadline of one call."""
    max_sessions: int = 4096


class RewardEntry(Model):
    """One rule reward of the manifest."""

    name: str
    rule: str
    """Import path of a function, or the name of a built-in."""
    config: dict[str, Any] = {}
    weight: float = 1.0
    seconds: float = 10.0
    """Its time limit for one episode."""


class JudgeSettings(ServiceSettings):
    """The judge."""

    rewards: tuple[RewardEntry, ...]
    processes: int = 1
    """Processes per reward."""


class RolloutSettings(ServiceSettings):
    """A rollout worker."""

    tokenizer: str
    """Folder or Hugging Face id with tokenizer.json and a chat template."""
    template: str | None = None
    """File of a chat template that replaces the model's own."""
    agent: str
    """`tool_agent`, `single_turn`, or an import path."""
    agent_config: dict[str, Any] = {}
    tool_call_format: str | None = None
    """Name or import path; None chooses it from the template."""
    agents: dict[str, str] = {}
    """Further loops, by the name that rows select them with."""
    offers_tools: bool = False
    """Whether the job has tools."""
    tools_address: str
    judge_address: str
    concurrency: int
    context_length: int
    """Tokens the engine can hold in one sequence."""
    max_parallel_calls: int = 8
    max_tool_tokens: int = 1024
    """Longer observations are cut, with a marker."""
    call_seconds: float = 30.0
    drain_seconds: float = 20.0


class AgentSettings(ServiceSettings):
    """An engine agent."""

    engine_name: str
    engine_url: str
    base_model: str
    """Name under which the engine serves the base model."""
    adapters_dir: str
    """Folder shared with the engine, emptied of retired versions."""
    failure_file: str | None = None
    """Where the engine writes why it could not start."""
    slots: int
    """Adapters the engine can hold at once."""
    probe_bound: float
    """Largest accepted difference between the engine's and the learner's probe log-probs."""
    load_seconds: float = 60.0
    poll_seconds: float = 1.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. Where agents share one, KESTRL_INDEX says whose engine it is.

        Raises:
            UserInputError: It is missing or not what this version expects.
        """
        settings, index = super().read(path), os.environ.get(INDEX_VARIABLE)
        return settings.model_copy(update={"engine_name": f"engine-{index}"}) if index else settings


class EngineEntry(Model):
    """One engine as the learner sees it."""

    name: str
    url: str
    agent_address: str


class DataSettings(Model):
    """A data set."""

    path: str
    size: int | None = None
    """Scenarios used; None uses all."""


class AlgorithmSettings(Model):
    """How a batch becomes a gradient."""

    name: str
    """Of a preset, or a class by import path."""
    group_size: int
    groups_per_step: int
    learning_rate: float
    clip_low: float
    clip_high: float
    max_staleness: int
    on_failed_episode: Literal["drop", "shrink"]
    min_group_size: int
    max_grad_norm: float
    weight_decay: float
    warmup_steps: int
    advantage: str
    loss: str
    importance_cap: float | None
    """Token TIS bound C, when staleness is above 0."""
    config: dict[str, Any] = {}
    """Keyword arguments of a class by import path."""
    aggregation: str = "token_mean"
    horizon: int = 1
    """Tokens that `seq_mean_token_sum_norm` divides by."""
    clip_dual: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    dynamic_sampling: bool = False
    max_sampled_batches: int = 10


class EvaluateSettings(Model):
    """Evaluate instead of training."""

    adapter: str | None
    """Object-store address of the adapter's folder; None evaluates the base model."""


class GapBounds(Model):
    """How far learner and engine may be apart on the same tokens, in nats a token."""

    mean: float
    p99: float
    max: float
    ess: float
    """Smallest effective sample size, as a share of the tokens."""


class LearnerSettings(ServiceSettings):
    """The learner."""

    evaluate: EvaluateSettings | None = None
    """When set: publish nothing, train nothing, evaluate this once on the validation data and end."""

    model: str
    """Folder or Hugging Face id of the base model."""
    dtype: Literal["float32", "bfloat16"]
    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    data: DataSettings
    validation: DataSettings | None
    seed: int
    epochs: int
    max_steps: int | None
    eval_every: int | None
    checkpoint_every: int
    keep_checkpoints: int
    keep_adapters: int | None = None
    keep_episodes: int | None = None
    temperature: float
    max_tokens: int
    max_turns: int
    max_tokens_per_turn: int
    tool_seconds: float
    turn_seconds: float
    episode_seconds: float
    group_seconds: float
    step_seconds: float | None = None
    """That a step waits for its groups; None: for as long as they take."""
    stale_groups: Literal["wait", "release"] = "release"
    """What becomes of a running group that the next version would make too old."""
    algorithm: AlgorithmSettings
    storage: str
    """Object-store address of the run's folder: adapters/, checkpoints/, episodes/, summary.json lie beneath."""
    storage_seconds: float = 600.0
    """How long a storage that does not answer is waited for, an outage."""
    database: str
    """SQLAlchemy address of the ledger."""
    rollout_addresses: tuple[str, ...]
    engines: tuple[EngineEntry, ...]
    adapter_slots: int
    """Versions every engine can hold."""
    gap_bounds: GapBounds
    """On tokens of the newest policy; beyond one of them the run stops."""
    max_failed_share: float
    """Share of episodes of a step that may fail for other reasons than the policy before the run stops."""
    threads: int | None = None
    """torch threads; None leaves torch's choice."""
    device: str = "cpu"
    start_seconds: float = 600.0
    """How long to wait for engines and workers to come up."""
    tools: bool = False
    """Whether the job offers any tool."""
    linger: bool = False
    """Whether the program stays when the run has ended, and tells how it ended until it is told to go: on a cluster the pod of a
    StatefulSet is started again when its program ends."""
    traceparent: str | None = None
    """W3C trace context that the run's root span belongs to, such as the operator's reconcile of the job; None begins a trace."""
