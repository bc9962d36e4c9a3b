"""The models of `AgentRLJob`, field by field. camelCase in the manifest, snake_case here; unknown fields are refused.

Cross-field rules are in `rules.py`, so that every problem of a manifest can be told at once.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kestrl.spec.algorithms import Algorithm
from kestrl.spec.model import LARGEST_CONTEXT, LARGEST_SEED, Model, NonNegativeInt, Positive, PositiveInt
from kestrl.spec.scalars import Address, Duration, DurationOrZero, ImportPath, JobName, JsonObject, Name

API_VERSION = "kestrl.dev/v1alpha1"
KIND = "AgentRLJob"


class SecretRef(Model):
    """A secret by reference: its keys become environment variables of the processes that need it."""

    name: Name
    """Name of a Secret; on one machine of the file `NAME.env` beside the manifest, with NAME=VALUE a line."""


class Adapter(Model):
    """The LoRA adapter that is trained."""

    rank: PositiveInt = 8
    """Rank of the adapter; engines accept 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    alpha: Positive = 16.0
    """Scaling: the adapter's output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = "all-linear"
    """Modules that get an adapter: `all-linear`, or names such as q_proj."""


class ModelSpec(Model):
    """What is trained."""

    base: Address
    """demo://NAME, hf://ORG/NAME, s3://..., pvc://..., or a path. Never written to."""
    adapter: Adapter = Adapter()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the base model, in the learner and in the engines."""


class DataSet(Model):
    """One data set."""

    uri: Address
    """A .jsonl or .parquet file (path or file://), or demo://NAME/PATH."""
    size: PositiveInt | None = None
    """Rows used; without it, all."""


class Data(Model):
    """What is attempted."""

    train: DataSet
    validation: DataSet | None = None
    """Held out: evaluated before, during and after, never trained on."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    """Seeds the order of scenarios, the sampling and the adapter's initialisation."""


class Template(Model):
    """A chat template that replaces the model's own."""

    uri: Address


TOOL_CALL_FORMAT = r"^(hermes|qwen_xml|llama3_json|mistral|harmony|pythonic|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$"
"""A built-in tool-call format, or `package.module:Format`."""
LoopPath = Annotated[str, Field(pattern=r"^([a-z_]+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
LoopName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class Agent(Model):
    """How a scenario is attempted."""

    loop: LoopPath = "tool_agent"
    """`tool_agent`, `single_turn`, or a class by import path (ours or one written for verl)."""
    loops: dict[LoopName, LoopPath] = {}
    """Further loops by name. A row's `agent_name` selects one of these, or a built-in one; without it `loop` is used."""
    config: JsonObject = {}
    """Keyword arguments of the loop's class (or of the function, beside the conversation), the same for every episode."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Completions of one episode at the most."""
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 2048
    """Sampled tokens of one episode at the most."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] | None = None
    """Sampled tokens of one turn at the most; without it only max_tokens bounds a turn."""
    max_tool_tokens: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 1024
    """Longer observations are cut, with a marker."""
    max_parallel_calls: Annotated[int, Field(ge=1, le=1024)] = 8
    """Tool calls of one turn that are carried out."""
    template: Template | None = None
    tool_call_format: Annotated[str, Field(pattern=TOOL_CALL_FORMAT)] | None = None
    """How the model writes tool calls: hermes, qwen_xml, llama3_json, mistral, harmony, pythonic, or a format of your own by import
    path. Without it the chat template decides; one whose format is unknown is refused when tools are offered."""


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class Tool(Model):
    """One tool, or one environment whose methods are tools."""

    name: ToolName | None = None
    """What the model calls it; of an environment, what rows call it. Without it the last part of `use`."""
    use: ImportPath
    """A function, a class whose instances are called, or an environment: a class whose methods are tools. One instance per episode."""
    methods: Annotated[list[ToolName], Field(min_length=1, max_length=64)] | None = None
    """The environment's methods that are tools; without it, of a class without `__call__`, all public ones."""
    config: JsonObject = {}
    """Keyword arguments of the function or class, the same for every episode; rows cannot change them."""

    @property
    def label(self) -> str:
        """`name`, or the last part of `use`."""
        return self.name or self.use.rpartition(":")[2].rpartition(".")[2]


class RulerSpec(Model):
    """A language model that ranks the episodes of a group. Named here so that manifests are stable; not available yet."""

    endpoint: Address
    """Base URL of an OpenAI-compatible server."""
    model: str
    """As that server names it."""
    secret_ref: SecretRef | None = None
    """Its credentials."""


class Reward(Model):
    """One component of the reward."""

    rule: str | None = None
    """`exact_answer`, `flexible_answer`, `format`, `loop_reward` (what the agent loop returned), or a function by import path."""
    config: JsonObject = {}
    """Keyword arguments of the function, beside the attempt."""
    ruler: RulerSpec | None = None
    weight: Annotated[float, Field(strict=False)] = 1.0
    """The reward of an episode is the weighted sum of its components."""
    timeout: Duration = 10.0
    """Time for one episode; past it the episode has no reward."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.rule is None) == (self.ruler is None):
            raise ValueError("give either `rule` or `ruler`, and one of them only")
        return self


class Sampling(Model):
    """How the policy is sampled in training. top_p is 1 and top_k is off, or the learner could not reproduce the log-probs."""

    temperature: Annotated[float, Field(ge=0, le=5, strict=False)] = 1.0
    """The logits are divided by it, by engine and learner alike; above 0."""


class Schedule(Model):
    """How long, and how often what."""

    epochs: PositiveInt = 1
    """How often every scenario is attempted."""
    max_steps: PositiveInt | None = None
    """Optimiser steps at the most, whatever the epochs say."""
    stale_groups: Literal["release", "wait"] = "release"
    """What becomes of a running group that the next version would make too old: `release` gives it up, to be attempted again; `wait` has the
    step wait for it. Releasing is faster while engines have room, waiting spends no engine time in vain."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; without it only before and after."""
    checkpoint_every: PositiveInt = 10
    """Steps between checkpoints; the last step and a drain are checkpointed, too."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept in storage."""
    keep_adapters: PositiveInt | None = None
    """Newest versions kept in storage, beside those that an engine serves or a checkpoint needs; without it all are kept."""
    keep_episodes: PositiveInt | None = None
    """Newest steps whose training episodes are kept in storage; without it all are kept."""


class Accelerator(Model):
    """What a component computes on."""

    profile: Name = "cpu"
    """cpu, nvidia or ascend; a cluster may know others."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices per replica."""


class Inference(Model):
    """The engines."""

    engine: Literal["vllm"] = "vllm"
    """What serves the model."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Engines, each with the whole model."""
    accelerator: Accelerator = Accelerator()
    context_length: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 4096
    """Tokens of one sequence at the most."""
    adapter_slots: Annotated[int, Field(ge=1, le=128)] = 4
    """Adapter versions an engine holds at once; at least maxStaleness + 2."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of one engine, on profile cpu. More of them than cores, over all engines, is several times slower."""
    args: dict[str, str | int | float | bool] = {}
    """Further arguments of the engine's server, such as `max-num-seqs: 64`; `true` gives a bare flag."""


class Deadlines(Model):
    """They nest: tool < turn < episode < group < step."""

    tool: Duration = 30.0
    """Of one tool call; an episode's first, before which its tools are made, has as long again."""
    turn: Duration = 120.0
    """Of one completion; a tool service that is being started again is waited for within it."""
    episode: Duration = 600.0
    """Of all turns of an episode."""
    group: Duration | None = None
    """The episodes and their scoring, once the last has a slot. Without it the episode's deadline plus every reward's timeout for each."""
    step: Duration | None = None
    """A step's wait for its groups: then it trains on those that are whole, and the others are attempted again. Without it each group's own counts."""


class Rollout(Model):
    """The rollout workers."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workers; on a cluster the scale subresource sets it."""
    concurrency: Annotated[int, Field(ge=1, le=16_384)] = 64
    """Episodes one worker runs at once."""
    deadlines: Deadlines = Deadlines()


class Learner(Model):
    """The learner."""

    accelerator: Accelerator = Accelerator()
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one process; without it all cores."""


class Storage(Model):
    """Where adapters, checkpoints and episodes go."""

    uri: Address | None = None
    """file://..., s3://bucket/prefix, gs://..., az://...; each run gets a folder beneath. Without it the run's own folder."""
    secret_ref: SecretRef | None = None
    """A Secret of the job's namespace whose entries become environment variables, such as AWS_ACCESS_KEY_ID."""
    retry_timeout: DurationOrZero = 600.0
    """How long the learner waits for a storage that does not answer (refused connections, 5xx) before the run stops. Refusals are not retried."""


class Telemetry(Model):
    """Where spans and metrics go."""

    otlp: Address | None = None
    """An OTLP/gRPC endpoint such as http://127.0.0.1:4317. The standard OTEL_* variables also work."""


class FailureRule(Model):
    """What is done when a part of the job fails in a certain way; the first rule that fits counts."""

    role: Literal["inference", "rollout", "tools", "judge", "learner"] | None = None
    """The part; without it any."""
    reason: Annotated[str, Field(pattern=r"^(\*|[A-Za-z]+|[a-z_]+/(\*|[a-z0-9_]+))$")] = "*"
    """`OOMKilled` or `Error` of a container, or `boundary/code` of what the learner told, such as `engine/logprob_gap`; `*` is any."""
    action: Literal["RestartComponent", "RestartJob", "Ignore", "Fail"]
    """RestartComponent starts the learner again, RestartJob all pods, and Fail ends the job; Ignore starts the learner again without counting.

    A container that ended is restarted in its pod whatever is written here, unless RestartJob or Fail is. Preemption and eviction never count."""


class FailurePolicy(Model):
    """What failures lead to, on a cluster."""

    backoff_limit: NonNegativeInt = 3
    """Restarts after the learner told of a failure, each after twice the wait of the one before; one more failure ends the job."""
    rules: list[FailureRule] = []
    """Without a rule that fits, the learner is started again, and a container that ends by itself is restarted in its pod."""


class Patch(Model):
    """A change to the pods of one part, merged as `kubectl patch` does it: lists of containers, volumes and variables by their names."""

    role: Literal["inference", "rollout", "tools", "judge", "learner"]
    """Whose pods."""
    template: JsonObject
    """Of a PodTemplate: `metadata` (labels, annotations) and `spec`."""


class JobSpec(Model):
    """What a person wants."""

    model: ModelSpec
    data: Data
    agent: Agent = Agent()
    tools: list[Tool] = []
    rewards: Annotated[list[Reward], Field(min_length=1)]
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    inference: Inference = Inference()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    storage: Storage = Storage()
    telemetry: Telemetry = Telemetry()
    suspend: bool = False
    """Drain, checkpoint and release everything until it is false again."""
    failure_policy: FailurePolicy = FailurePolicy()
    patches: list[Patch] = []
    """On a cluster: whatever a pod should have that nothing above has a word for, such as requests, affinity or a volume.

    On one machine only the variables that a container takes from secrets count: `envFrom` and `env` with a secretKeyRef, from `NAME.env`."""
    pending_deadline: DurationOrZero | None = None
    """A job whose pods could not start for so long is failed (on a cluster); without it it waits."""
    active_deadline: Duration | None = None
    """The run is failed after so long."""
    ttl_after_finished: DurationOrZero | None = None
    """The object is deleted so long after it finished (on a cluster)."""


class Metadata(BaseModel):
    """The part of Kubernetes' ObjectMeta that KestRL reads; the rest is kept, not looked at."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: JobName
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class AgentRLJob(Model):
    """The whole loop in one object."""

    api_version: Literal["kestrl.dev/v1alpha1"]
    kind: Literal["AgentRLJob"]
    metadata: Metadata
    spec: JobSpec
