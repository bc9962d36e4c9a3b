"""Settings of each service: one model per service, written by `plan` and read by the service's `main`.

The local runner writes them to a file, the operator to a ConfigMap; both pass `--settings PATH`. They never contain
secrets, which are passed as environment variables (`kestrl.credentials`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from kestrl.plan.algorithm import AlgorithmSettings
from kestrl.plan.service_settings import INDEX_VARIABLE, Model, ServiceSettings
from kestrl.plan.tool_settings import ClaimEntry, SecretText
from kestrl.sampling import GREEDY, EvaluationSampling


class McpEntry(Model):
    """An MCP server of the manifest."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server on stdio; empty for one on HTTP."""
    env: dict[str, str] = {}
    secret_env: dict[str, SecretText] = {}
    url: str | None = None
    headers: dict[str, str] = {}
    secret_headers: dict[str, SecretText] = {}
    per_episode: bool = False
    concurrency: int = 16


class EndpointEntry(Model):
    """An endpoint of an HTTP server that the manifest declares."""

    name: str
    description: str
    method: str
    path: str
    parameters: dict[str, Any] = {}
    """JSON Schemas by parameter, those of the path included."""
    required: tuple[str, ...] = ()


class HttpEntry(Model):
    """An HTTP server of the manifest."""

    openapi: str | None = None
    """Path or URL of the OpenAPI document; None if `endpoints` has the tools."""
    endpoints: tuple[EndpointEntry, ...] = ()
    base_url: str | None = None
    """None means that of the document."""
    headers: dict[str, str] = {}
    secret_headers: dict[str, SecretText] = {}
    session_header: str | None = None
    allow_hosts: tuple[str, ...] = ()
    private_networks: tuple[str, ...] = ()
    seconds: float = 24.0
    """Time limit of a call with all its attempts, in seconds."""
    max_response_bytes: int = 100_000
    concurrency: int = 16


class ProcessEntry(Model):
    """The process of a Python tool."""

    memory_mb: int | None = None
    """Maximum memory of an instance in MiB; None means no limit."""


class ToolEntry(Model):
    """One entry of `spec.tools`: a Python tool or environment, or a server."""

    name: str
    use: str | None = None
    """Import path of a function or class."""
    methods: tuple[str, ...] | None = None
    """Methods of an environment that are tools; None means all public ones, or that it is not an environment."""
    config: dict[str, Any] = {}
    process: ProcessEntry | None = None
    """If set, instances run in processes of their own."""
    claim: ClaimEntry | None = None
    """If set, the tool's code runs in claimed sandboxes."""
    mcp: McpEntry | None = None
    http: HttpEntry | None = None
    tools: tuple[str, ...] | None = None
    """Tools of a server that are offered; None means all."""


class ToolsSettings(ServiceSettings):
    """The tool service."""

    tools: tuple[ToolEntry, ...]
    call_seconds: float
    """Deadline of one call in seconds."""
    max_sessions: int = 4096


class RewardEntry(Model):
    """One rule reward of the manifest."""

    name: str
    rule: str
    """Import path of a function, or the name of a built-in."""
    config: dict[str, Any] = {}
    weight: float = 1.0
    seconds: float = 10.0
    """Time limit for one episode in seconds."""
    field: str = "spec.rewards[0].rule"
    """Manifest field, for messages."""
    asks_judge: bool = False
    """Whether it may ask the correctness judge."""


class JudgeModel(Model):
    """A judge model behind an OpenAI-compatible endpoint."""

    model: str
    base_urls: tuple[str, ...]
    """Base URLs of equal servers, used in turn."""
    key_variable: str | None = None
    """Environment variable with the API key."""
    strict_schema: bool = False
    """Whether the server enforces every keyword of a schema, as vLLM does."""
    temperature: float | None = None
    input_price: float = 0.0
    """US dollars per million tokens of prompts."""
    output_price: float = 0.0
    """US dollars per million tokens of replies."""


class JudgeEntry(Model):
    """Judge models of the manifest, and the bounds on their use."""

    field: str = "spec.rewards[0].ruler"
    """Manifest field, for messages."""
    judges: tuple[JudgeModel, ...]
    """Judges in the order in which they are asked."""
    structured_output: Literal["json_schema", "json_object", "none"] = "json_schema"
    max_prompt_tokens: int = 32_768
    max_reply_tokens: int = 4096
    concurrency: int = 8
    request_seconds: float = 60.0
    seconds: float = 300.0
    """Time limit of one group."""
    budget_calls: int | None = None
    budget_tokens: int | None = None
    budget_cost: float | None = None
    """US dollars."""


class RulerEntry(JudgeEntry):
    """The ruler of the manifest."""

    weight: float = 1.0
    rubric: str | None = None
    gate: str | None = None
    """Name of the component that gates the ruler."""
    gate_minimum: float = 1.0
    permutations: int = 1
    show_reasoning: bool = False


class JudgeSettings(ServiceSettings):
    """The judge."""

    rewards: tuple[RewardEntry, ...]
    processes: int = 1
    """Processes per reward."""
    ruler: RulerEntry | None = None
    correctness: JudgeEntry | None = None
    """The judge models that decide whether an answer is correct."""
    state_dir: str | None = None
    """Folder of the journal of judge calls, from which a restarted judge continues; None keeps it in memory."""


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
    agents_config: dict[str, dict[str, Any]] = {}
    """Keyword arguments of the loops in `agents`, by name."""
    """Additional loops, by the name in rows."""
    offers_tools: bool = False
    """Whether the job has tools."""
    describes_tools: bool = False
    """Whether groups contain the schemas of the offered tools, for a judge model."""
    engine: str = "vllm"
    """Dialect of the job's engines."""
    tools_address: str
    judge_address: str
    concurrency: int
    context_length: int
    """Maximum tokens of one sequence."""
    max_parallel_calls: int = 8
    max_tool_tokens: int = 1024
    """Maximum tokens of an observation; longer ones are truncated with a marker."""
    call_seconds: float = 30.0
    drain_seconds: float = 20.0


class AgentSettings(ServiceSettings):
    """An engine agent."""

    engine: str = "vllm"
    """Dialect of the engine."""
    engine_name: str
    engine_url: str
    base_model: str
    """Name under which the engine serves the base model."""
    adapters_dir: str
    """Folder shared with the engine; retired versions are deleted from it."""
    failure_file: str | None = None
    """File in which the engine records why it could not start."""
    slots: int
    """Maximum number of adapters in the engine."""
    probe_bound: float
    """Largest accepted difference between the engine's and the learner's probe log-probs."""
    load_seconds: float = 60.0
    poll_seconds: float = 1.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. KESTRL_INDEX identifies the engine if agents share a file.

        Raises:
            UserInputError: The file is missing or invalid for this version.
        """
        settings, index = super().read(path), os.environ.get(INDEX_VARIABLE)
        return settings.model_copy(update={"engine_name": f"engine-{index}"}) if index else settings


class EngineEntry(Model):
    """An engine, for the learner."""

    name: str
    url: str
    agent_address: str


class DataSettings(Model):
    """A data set."""

    path: str
    size: int | None = None
    """Number of scenarios; None means all."""


class EvaluateSettings(Model):
    """Settings of an evaluation without training."""

    adapter: str | None
    """Object-store address of the adapter's folder; None evaluates the base model."""


class GapBounds(Model):
    """Bounds of the log-prob gap between learner and engine on the same tokens, in nats per token."""

    mean: float
    p99: float
    max: float
    ess: float
    """Smallest effective sample size, as a share of the tokens."""


class PolicySettings(Model):
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
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    tokens_per_pass: int = 16_384
    """Largest number of tokens of a forward pass."""


class SinkEntry(Model):
    """A metric sink of the manifest."""

    use: str
    """Import path."""
    config: dict[str, Any] = {}
    field: str
    """Manifest field, for messages."""


class RanksOfPods(Model):
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
    evaluation: EvaluationSampling = GREEDY
    """How the validation data are evaluated."""
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
    """Maximum seconds that a step waits for its groups; None means no limit."""
    stale_groups: Literal["wait", "release"] = "release"
    """Handling of a running group that the next version would make too old."""
    algorithm: AlgorithmSettings
    storage: str
    """Object-store address of the run's folder: adapters/, checkpoints/, episodes/, summary.json lie beneath."""
    storage_seconds: float = 600.0
    """Maximum seconds to wait for unavailable storage, per outage."""
    database: str
    """SQLAlchemy address of the ledger."""
    rollout_addresses: tuple[str, ...]
    engines: tuple[EngineEntry, ...]
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
