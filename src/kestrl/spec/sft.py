"""The manifest `SFTJob`: supervised fine-tuning of an adapter on conversations. Read by `kestrl sft`; pure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from kestrl.spec.adapter_rules import target_problems
from kestrl.spec.algorithms import LearningRateScheduleName
from kestrl.spec.job import Accelerator, Metadata, ModelSpec, Storage
from kestrl.spec.learner_rules import offload_problems
from kestrl.spec.load import ProblemsError, explain, read_document, with_overrides
from kestrl.spec.model import LARGEST_CONTEXT, LARGEST_SEED, Model, NonNegative, NonNegativeInt, Positive, PositiveInt
from kestrl.spec.problems import Problem
from kestrl.spec.scalars import Address

SFT_KIND = "SFTJob"


class Conversations(Model):
    """Conversations to learn from, or to evaluate on: either a file or the stored episodes of a run."""

    uri: Address | None = None
    """A .jsonl or .parquet file of rows with `messages` and, if tools are called, their JSON schemas as `tools`."""
    episodes: Address | None = None
    """Storage of a run, such as file:///runs/search-1/store: its training episodes as the exact tokens of their
    engine."""
    min_reward: Annotated[float, Field(strict=False)] | None = None
    """With `episodes`: only those with at least this reward."""
    size: PositiveInt | None = None
    """Number of conversations to use. Default: all."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.uri is None) == (self.episodes is None):
            raise ValueError("give either uri or episodes, and one of them only")
        if self.min_reward is not None and self.episodes is None:
            raise ValueError("minReward selects episodes; rows of a file have no reward")
        return self


class ConversationData(Model):
    """Training and validation data."""

    train: Conversations
    validation: Conversations | None = None
    """Never trained on; its loss is measured during and after training."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    """Seed of the order of conversations and of the adapter's initialisation."""


class Training(Model):
    """Schedule and optimiser."""

    epochs: PositiveInt = 1
    """Passes over the conversations."""
    max_steps: PositiveInt | None = None
    """Maximum number of steps. Default: no limit."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Conversations per step. They are computed some tokens at a time, so memory does not limit it."""
    max_tokens: Annotated[int, Field(ge=2, le=LARGEST_CONTEXT)] = 4096
    """Maximum tokens of a conversation; longer ones are left out and counted."""
    learning_rate: Positive = 2e-4
    """Learning rate of AdamW after the warm-up."""
    learning_rate_schedule: LearningRateScheduleName = "cosine"
    """Learning rate after the warm-up."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    """Learning rate of the last step as a share of `learningRate`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient, which is scaled down to it."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. Default: before and after training only."""
    checkpoint_every: PositiveInt = 50
    """Steps between checkpoints."""


class SFTLearner(Model):
    """The program that trains."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda|npu)(:[0-9]+)?$")] = "cpu"
    """torch device."""
    accelerator: Accelerator | None = None
    """Devices of the pod on a cluster. Default: one of profile cpu, nvidia or ascend, by `device`."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads. Default: all cores."""
    gradient_checkpointing: bool = False
    """Keep the inputs of layers only and compute their activations again in the backward pass."""
    activation_offload: bool = False
    """Keep these inputs of layers in host memory until the backward pass: device memory for longer rows, in exchange
    for copies. Needs gradientCheckpointing and a device other than a CPU."""
    tokens_per_pass: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 16_384
    """Maximum tokens of one forward and backward pass, padding included."""


class SFTSpec(Model):
    """Supervised fine-tuning."""

    model: ModelSpec
    data: ConversationData
    training: Training = Training()
    learner: SFTLearner = SFTLearner()
    storage: Storage = Storage()
    template: Annotated[str, Field(min_length=1)] | None = None
    """File of a chat template that replaces the model's own; on a cluster s3://... or pvc://CLAIM/PATH."""


class SFTJob(Model):
    """Supervised fine-tuning of an adapter, from which reinforcement learning can start."""

    api_version: Literal["kestrl.dev/v1alpha1"]
    kind: Literal["SFTJob"]
    metadata: Metadata
    spec: SFTSpec


def parse_sft_job(document: Any) -> SFTJob:
    """A job from a parsed manifest.

    Raises:
        ProblemsError: With every problem at once.
    """
    if not isinstance(document, dict):
        raise ProblemsError([Problem("manifest", f"must be an object, is {type(document).__name__}")])
    try:
        job = SFTJob.model_validate(document)
    except ValidationError as error:
        raise ProblemsError(list(dict.fromkeys(explain(item, SFTJob) for item in error.errors()))) from error
    learner = job.spec.learner
    offloading = offload_problems(
        offload=learner.activation_offload,
        checkpointing=learner.gradient_checkpointing,
        on_cpu=learner.device.startswith("cpu"),
    )
    if problems := [*target_problems(job.spec.model.adapter), *offloading]:
        raise ProblemsError(problems)
    return job


def read_sft_job(path: Path, overrides: tuple[str, ...] = ()) -> SFTJob:
    """The job of a manifest file.

    Raises:
        UserInputError: The file cannot be read.
        ProblemsError: With every problem at once.
    """
    return parse_sft_job(with_overrides(read_document(path, SFT_KIND), overrides))
