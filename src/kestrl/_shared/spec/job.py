"""The models of `AgentRLJob`. Fields are camelCase in the manifest and snake_case here; unknown fields are refused.

Cross-field rules are in `rules.py`, so that all problems of a manifest are reported at once.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kestrl._shared.spec.agent import Agent
from kestrl._shared.spec.algorithms import Algorithm
from kestrl._shared.spec.environments import Environment
from kestrl._shared.spec.inference import Accelerator, Inference
from kestrl._shared.spec.judges import CorrectnessSpec, RulerSpec
from kestrl._shared.spec.model import (
    LARGEST_SEED,
    MOST_SAMPLES,
    Model,
    NonNegativeInt,
    Passes,
    Positive,
    PositiveInt,
    listed,
)
from kestrl._shared.spec.patches import Patch
from kestrl._shared.spec.scalars import (
    Address,
    Duration,
    DurationOrZero,
    ImportPath,
    JobName,
    JsonObject,
    Name,
)
from kestrl._shared.spec.secrets import SecretRef
from kestrl._shared.spec.tools import Tool
from kestrl.rewards.registry import BUILT_IN as REWARDS
from kestrl.tools.shapes import is_mapping

API_VERSION = "kestrl.dev/v1alpha1"
KIND = "AgentRLJob"


class Adapter(Model):
    """The LoRA adapter that is trained."""

    rank: PositiveInt = 8
    """Rank of the adapter; engines accept 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    alpha: Positive = 16.0
    """Scaling: the adapter's output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = "all-linear"
    """Modules with an adapter: `all-linear`, or names such as q_proj."""
    from_: Annotated[str, Field(pattern=r"^[a-z0-9]+://.+", max_length=1024)] | None = Field(default=None, alias="from")
    """Address of a published adapter to start from, such as `kestrl sft` prints. It has the same rank, alpha and
    targets. Default: a new adapter."""


class ModelSpec(Model):
    """The model to train."""

    base: Address
    """Base model: demo://NAME, hf://ORG/NAME, s3://..., pvc://..., or a path. Read-only."""
    adapter: Adapter = Adapter()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the base model, in the learner and in the engines."""


class DataSet(Model):
    """A data set."""

    uri: Address
    """A .jsonl or .parquet file (path or file://), or demo://NAME/PATH."""
    size: PositiveInt | None = None
    """Number of rows to use. Default: all."""


UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SPARE = 1.1
"""Size of a volume of files as a multiple of theirs: a file system takes a part."""


class DataFile(Model):
    """A file that tools read, such as a database."""

    uri: Address
    """s3://BUCKET/PATH#sha256=DIGEST (or gs, az), by which rows and `config` of tools name it."""
    size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$")]
    """Most that it has, such as 4Gi."""
    timeout: Duration = 3600.0
    """Time limit of its download."""

    @property
    def most_bytes(self) -> int:
        return int(self.size[:-2]) * UNITS[self.size[-2:]]


class Data(Model):
    """Training and validation data."""

    train: DataSet
    validation: DataSet | None = None
    """Validation data: evaluated before, during and after training, never trained on."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    """Seed of the order of scenarios, of sampling, and of the adapter's initialisation."""
    files: Annotated[list[DataFile], Field(max_length=16)] = []
    """Files that tools read. On a cluster they are fetched into a volume, which tools mount read-only."""

    @property
    def held_out_apart(self) -> bool:
        """Whether the validation data are another data set than the training data: one that is named twice is meant."""
        return self.validation is not None and self.validation.uri != self.train.uri

    @property
    def files_gib(self) -> int:
        """GiB of a volume that holds the files."""
        return math.ceil(SPARE * sum(file.most_bytes for file in self.files) / 2**30)


_RULES = listed({name: reward.summary for name, reward in REWARDS.items()})


class Reward(Model):
    """One component of the reward: a rule, or a judge model."""

    rule: Annotated[str | None, Field(description=f"{_RULES}, or the import path of a function.")] = None
    config: JsonObject = {}
    """Additional keyword arguments of the function."""
    ruler: RulerSpec | None = None
    """A judge model that scores the episodes of a group relative to each other."""
    correctness: CorrectnessSpec | None = None
    """A judge model that the rule asks whether an answer is correct (`Attempt.judged_correct`). An episode whose answer
    it did not judge has no reward."""
    weight: Annotated[float, Field(strict=False)] = 1.0
    """Weight of the component; the reward of an episode is the weighted sum."""
    timeout: Duration = 10.0
    """Time limit of a rule for one episode; after it the episode has no reward. A ruler has its own."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.rule is None) == (self.ruler is None):
            raise ValueError("give either `rule` or `ruler`, and one of them only")
        if self.correctness is not None and self.rule is None:
            raise ValueError("`correctness` belongs to a `rule`; a ruler takes none")
        return self


class Sampling(Model):
    """Sampling in training. top_p is always 1 and top_k is off, since the learner must reproduce the log-probs."""

    temperature: Annotated[float, Field(ge=0, le=5, strict=False)] = 1.0
    """Divisor of the logits, in engine and learner; above 0."""


class Evaluation(Model):
    """Sampling of evaluations, before, during and after training and by `kestrl eval`."""

    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    """Episodes of each question; with several, an evaluation has mean@K, pass@k, best@k and maj@K."""
    temperature: Annotated[float, Field(ge=0, le=5, strict=False)] | None = None
    """Divisor of the logits; 0 is greedy. Default: that of `sampling` if samples, topP or topK is set, or else 0."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=False)] = 1.0
    """Sample from the smallest set of most probable tokens with at least this probability; 1 is off."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most probable tokens; 0 is off."""


class Schedule(Model):
    """Length of the run, and intervals."""

    epochs: PositiveInt = 1
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimiser steps."""
    stale_groups: Literal["release", "wait", "continue"] = "release"
    """A running group that the next version would make too old: `release` retries it later, `wait` has the step wait,
    `continue` samples on by newer versions."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. Default: only before and after training."""
    checkpoint_every: PositiveInt = 10
    """Steps between checkpoints; there is also one at the last step and on a drain."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints kept in storage."""
    keep_adapters: PositiveInt | None = None
    """Number of newest versions kept in storage, in addition to those in use by an engine or a checkpoint. Default:
    all."""
    keep_episodes: PositiveInt | None = 1000
    """Number of newest steps whose training episodes are kept in storage; null keeps all. Those of evaluations are all
    kept."""


class Deadlines(Model):
    """Deadlines, which must be nested: tool < turn < episode < group < step."""

    tool: Duration = 30.0
    """Deadline of one tool call; doubled for the first call of an episode, which creates the tools."""
    turn: Duration = 120.0
    """Deadline of one completion, also of waiting for a tool service that is restarting."""
    episode: Duration = 600.0
    """Deadline of all turns of an episode."""
    group: Duration | None = None
    """Deadline of the episodes of a group and their scoring, from when the last one has a slot. Default: the episode's
    deadline plus the reward timeouts of every episode."""
    step: Duration | None = None
    """Deadline of a step's wait for groups: it then trains on complete groups, and the others are retried. Default: the
    deadlines of the groups."""


class Rollout(Model):
    """The rollout workers."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of workers; on a cluster set by the scale subresource."""
    concurrency: Annotated[int, Field(ge=1, le=16_384)] = 64
    """Concurrent episodes of one worker."""
    deadlines: Deadlines = Deadlines()


class Learner(Passes):
    """The learner."""

    accelerator: Accelerator = Accelerator()
    """Devices of each replica. With more than one in all, each has a process, a rank, and the base model is sharded
    over them; on profile cpu ranks share the cores."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Replicas with accelerator.count ranks each. On a cluster they are pods, the first of which is the learner; one
    machine needs replicas x accelerator.count devices."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one rank. Default: all cores, divided by the ranks."""
    termination_grace: Duration = 180.0
    """Time between SIGTERM and SIGKILL of the learner's pod. A checkpoint precedes an update that may take longer."""


class Storage(Model):
    """Storage of adapters, checkpoints and episodes."""

    uri: Address | None = None
    """file://..., s3://bucket/prefix, gs://..., az://...; each run uses a folder in it. Default: the folder of the
    run."""
    secret_ref: SecretRef | None = None
    """Secret in the job's namespace whose entries have names of environment variables, such as AWS_ACCESS_KEY_ID."""
    service_account: Name | None = None
    """ServiceAccount in the job's namespace whose cloud identity (IRSA, Workload Identity) reaches the storage; the
    administrator lists those that jobs may name. Ignored on one machine."""
    retry_timeout: DurationOrZero = 600.0
    """Maximum time that the learner waits for storage that does not answer (refused connections, 5xx), or denies access
    that it has allowed before."""


class MetricSinkSpec(Model):
    """A destination of the run's metrics, such as an experiment tracker."""

    use: ImportPath
    """Import path of a class with the methods of `kestrl.metric_sinks.MetricSink`. It runs in the learner; what it
    raises is reported and does not end the run."""
    config: JsonObject = {}
    """Keyword arguments of the class."""


class MLflowTracking(Model):
    """An MLflow server that a run is sent to while it goes on, as by `kestrl push --to mlflow --follow`."""

    uri: Annotated[str, Field(pattern=r"^(https?://[^\s/@]+(/\S*)?|sqlite:///\S+)$")]
    """Address of the server without credentials, or sqlite:///FILE, a database of this machine."""
    experiment: Annotated[str, Field(max_length=200)] = ""
    """Name of the experiment. Default: the job's name."""
    sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0
    """Share of groups whose episodes are sent; metrics and the result always are."""
    secret_ref: SecretRef | None = None
    """Secret with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""


class Telemetry(Model):
    """Export of spans and metrics."""

    otlp: Address | None = None
    """OTLP endpoint: http://127.0.0.1:4317 for gRPC; one with port 4318 or with a path for HTTP. The standard OTEL_*
    variables also work."""
    traced_groups: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.1
    """Share of groups whose episodes, model calls, tool calls and scores are traced; steps and publications always are.
    OTEL_TRACES_SAMPLER overrides it."""
    sinks: Annotated[list[MetricSinkSpec], Field(max_length=8)] = []
    """Metric sinks, beside the files under `metrics/` and OpenTelemetry."""
    mlflow: MLflowTracking | None = None
    """MLflow server that receives the run and a trace of each episode. A server that is down stops no run."""


class FailureRule(Model):
    """Action for a kind of failure; the first matching rule applies."""

    role: Literal["inference", "rollout", "agent", "tools", "judge", "learner"] | None = None
    """Role of the component. Default: any."""
    reason: Annotated[str, Field(pattern=r"^(\*|[A-Za-z]+|[a-z_]+/(\*|[a-z0-9_]+))$")] = "*"
    """`OOMKilled` or `Error` of a container, or `boundary/code` of a failure reported by the learner, such as
    `engine/logprob_gap`; `*` matches any."""
    action: Literal["RestartComponent", "RestartJob", "Ignore", "Fail"]
    """RestartComponent restarts the learner, RestartJob all pods, Fail ends the job, and Ignore restarts the learner
    without counting.

    An ended container is always restarted in its pod, except for RestartJob and Fail. Preemption and eviction never
    count."""


class FailurePolicy(Model):
    """Handling of failures on a cluster."""

    backoff_limit: NonNegativeInt = 3
    """Maximum restarts after failures reported by the learner, with exponential back-off; one more failure ends the
    job."""
    rules: list[FailureRule] = []
    """Rules by priority. Without a matching rule the learner is restarted."""


def _without_required_rewards(schema: dict[str, Any]) -> None:
    """Leaves rewards out of what a schema requires: they are filled in for a job with an environment."""
    schema["required"] = [name for name in schema["required"] if name != "rewards"]


class JobSpec(Model):
    """Desired state of a job."""

    model_config = ConfigDict(json_schema_extra=_without_required_rewards)
    model: ModelSpec
    data: Data
    agent: Agent = Agent()
    environment: Environment | None = None
    """Somebody's task with its own reset, steps and score, in place of `tools`. Without `rewards`, its own reward is
    that of the job."""
    tools: list[Tool] = []
    rewards: Annotated[list[Reward], Field(min_length=1)]
    """Components of the reward. Required, unless `environment` brings its own."""
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    inference: Inference = Inference()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    storage: Storage = Storage()
    telemetry: Telemetry = Telemetry()
    suspend: bool = False
    """Whether to suspend the job: drain, checkpoint and release all pods until it is false."""
    failure_policy: FailurePolicy = FailurePolicy()
    patches: list[Patch] = []
    """Patches of pods on a cluster, for settings without a field of their own, such as requests, affinity or volumes.

    On one machine only variables from secrets apply: `envFrom` and `env` with a secretKeyRef, read from `NAME.env`."""
    pending_deadline: DurationOrZero | None = None
    """Time after which a job fails if its pods have not started (on a cluster). Default: no limit."""
    active_deadline: Duration | None = None
    """Maximum duration of the run, after which it fails."""
    ttl_after_finished: DurationOrZero | None = None
    """Time after the end of the job when the object is deleted (on a cluster). Default: never."""

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, spec: object) -> object:
        """The reward of a job with an environment that names none: the environment's."""
        if not is_mapping(spec) or "environment" not in spec or "rewards" in spec:
            return spec
        return {**spec, "rewards": [{"rule": "environment_reward"}]}


class Metadata(BaseModel):
    """The part of Kubernetes' ObjectMeta that KestRL reads; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: JobName
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class AgentRLJob(Model):
    """A training run of a tool-using language-model agent."""

    api_version: Literal["kestrl.dev/v1alpha1"]
    kind: Literal["AgentRLJob"]
    metadata: Metadata
    spec: JobSpec


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `AgentRLJob`, as the manifest is written: for editors and for the CRD."""
    schema = AgentRLJob.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
