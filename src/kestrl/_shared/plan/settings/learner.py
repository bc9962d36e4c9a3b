"""Settings of the learner, of its ranks, and of the model that it trains."""

from __future__ import annotations

from typing import Any, Literal

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl._shared.plan.settings.common import DataSettings, ServiceSettings, SettingsModel
from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.runstate.sampling import GREEDY, EvaluationSampling


class EngineEntry(SettingsModel):
    """An engine, for the learner."""

    name: str
    url: str
    agent_address: str


class EngineList(SettingsModel):
    """A file with the engines of a run, kept by the program that starts and ends them."""

    engines: tuple[EngineEntry, ...]


class EvaluateSettings(SettingsModel):
    """Settings of an evaluation without training."""

    adapter: str | None
    """Object-store address of the adapter's folder; None evaluates the base model."""


class GapBounds(SettingsModel):
    """Bounds of the log-prob gap between learner and engine on the same tokens, in nats per token."""

    mean: float
    p99: float
    max: float
    ess: float
    """Smallest effective sample size, as a share of the tokens."""


class PassSettings(SettingsModel):
    """How much a forward pass computes, and what it keeps for the backward pass."""

    gradient_checkpointing: bool = False
    checkpointed_layers: int | None = None
    """Number of the first layers that keep their inputs only; None is all."""
    activation_offload: bool = False
    compile_layers: bool = False
    tokens_per_pass: int = 16_384
    """Largest number of tokens of a forward pass."""

    def pass_options(self) -> dict[str, Any]:
        """These fields as keyword arguments of a model under training."""
        return self.model_dump(include=set(PassSettings.model_fields))


class PolicySettings(PassSettings):
    """The model under training, in a learner's and in an SFT run's settings."""

    model: str
    """Folder or Hugging Face id of the base model."""
    dtype: Literal["float32", "bfloat16"]
    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    adapter_from: str | None = None
    """Address of the adapter that version 0 is."""
    seed: int
    device: str = "cpu"


class SinkEntry(SettingsModel):
    """A metric sink of the manifest."""

    use: str
    """Import path."""
    config: dict[str, Any] = {}
    field: str
    """Manifest field, for messages."""


class RanksOfPods(SettingsModel):
    """The ranks of a learner, and how they are divided among pods."""

    ranks: int = 1
    """Processes that compute together, each with a device of its own."""
    pods: int = 1
    """Pods with equally many ranks; the learner's is the first."""

    @property
    def ranks_per_pod(self) -> int:
        return self.ranks // self.pods


class RanksSettings(ServiceSettings, RanksOfPods):
    """Pods of ranks beside the learner's."""

    leader: str
    """`host:port` of rank 0's store."""
    device: str


class LearnerSettings(ServiceSettings, PolicySettings, RanksOfPods):
    """The learner."""

    ranks_listen: str | None = None
    """`host:port` where ranks of other pods join; None for a free port of the loopback interface."""
    evaluate: EvaluateSettings | None = None
    """If set: evaluate this once on the validation data and end, without training or publishing."""
    data: DataSettings
    validation: DataSettings | None
    held_out_apart: bool = False
    """Whether the manifest names another data set for validation than for training: then tasks of both are reported."""
    evaluation: EvaluationSampling = GREEDY
    """How the validation data are evaluated."""
    epochs: int
    max_steps: int | None
    eval_every: int | None
    checkpoint_every: int
    grace_seconds: float = 180.0
    """Seconds in which the program must end once it is asked to."""
    keep_checkpoints: int
    keep_adapters: int | None = None
    keep_episodes: int | None = 1000
    temperature: float
    max_tokens: int
    max_turns: int
    max_tokens_per_turn: int
    deadlines: RolloutDeadlines
    algorithm: AlgorithmSettings
    storage: str
    """Object-store address of the run's folder: adapters/, checkpoints/, episodes/, summary.json lie beneath."""
    storage_seconds: float = 600.0
    """Maximum seconds to wait for unavailable storage, per outage."""
    database: str
    """SQLAlchemy address of the ledger."""
    rollout_addresses: tuple[str, ...]
    engines: tuple[EngineEntry, ...] = ()
    """All engines, if their number cannot change."""
    engines_file: str | None = None
    """Path of an `EngineList` that is read again and again, in place of `engines`."""
    engine_agents: str | None = None
    """`dns://host:port` of which each address is an engine's agent, in place of `engines`."""
    turns: bool = False
    """Whether the engines give their device to the learner for each update."""
    base_offload: bool = False
    """Whether the base is kept in host memory while the engines have the device."""
    adapter_slots: int
    """Maximum number of versions in every engine."""
    gap_bounds: GapBounds
    """Bounds on tokens of the newest policy; the run stops if one is exceeded."""
    max_failed_share: float
    """Maximum share of a step's episodes that fail for reasons other than the policy; above it the run stops."""
    threads: int | None = None
    """torch threads; None leaves torch's choice."""
    start_seconds: float = 600.0
    """Maximum seconds to wait for engines and workers to start."""
    tools: bool = False
    """Whether the job offers any tool."""
    sinks: tuple[SinkEntry, ...] = ()
    """Metric sinks beside storage and OpenTelemetry."""
    keep_alive: bool = False
    """Whether the program stays alive after the run and reports the result until it is terminated: on a cluster the pod
    of a StatefulSet is restarted when its program ends."""
    traceparent: str | None = None
    """W3C trace context of the parent of the run's root span, such as the operator's reconcile of the job; None starts
    a trace."""
