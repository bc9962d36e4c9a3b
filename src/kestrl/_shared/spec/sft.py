"""The manifest `SFTJob`: supervised fine-tuning of an adapter, or of a whole model, on conversations. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kestrl._shared.spec.algorithms import LearningRateScheduleName
from kestrl._shared.spec.inference import Accelerator
from kestrl._shared.spec.job import Adapter, Metadata, ModelSpec, Storage
from kestrl._shared.spec.load import read_kind, with_overrides
from kestrl._shared.spec.model import (
    LARGEST_CONTEXT,
    LARGEST_SEED,
    Model,
    NonNegative,
    NonNegativeInt,
    Passes,
    Positive,
    PositiveInt,
)
from kestrl._shared.spec.problems import Problem, ProblemsError
from kestrl._shared.spec.rules.adapter_rules import target_problems
from kestrl._shared.spec.rules.learner_rules import checkpointing_problems, offload_problems
from kestrl._shared.spec.scalars import Address, TemplateArguments
from kestrl._shared.spec.validation import validated

SFT_KIND = "SFTJob"
DEFAULT_LEARNING_RATES = {"adapter": 2e-4, "all": 2e-5}
"""By `training.parameters`; TRL's SFTTrainer and its guide to LoRA have the same."""


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
    """What is trained, schedule and optimiser."""

    parameters: Literal["adapter", "all"] = "adapter"
    """What is trained: `adapter`, which `model.adapter.from` of an AgentRLJob takes, or `all` parameters of the model,
    kept and updated in float32. The result is then a model, which `model.base` takes."""
    epochs: PositiveInt = 1
    """Passes over the conversations."""
    max_steps: PositiveInt | None = None
    """Maximum number of steps. Default: no limit."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Conversations per step. They are computed some tokens at a time, so memory does not limit it."""
    max_tokens: Annotated[int, Field(ge=2, le=LARGEST_CONTEXT)] = 4096
    """Maximum tokens of a conversation; longer ones are left out and counted."""
    learning_rate: Positive | None = None
    """Learning rate of AdamW after the warm-up. Default: 2e-4 for an adapter, 2e-5 for all parameters."""
    learning_rate_schedule: LearningRateScheduleName = "cosine"
    """Learning rate after the warm-up."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    """Learning rate of the last step as a share of `learningRate`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.99
    """Decay of AdamW's mean of squared gradients; TRL's default is 0.999."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient, which is scaled down to it."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. Default: before and after training only."""
    checkpoint_every: PositiveInt = 50
    """Steps between checkpoints."""

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, or the default for what is trained."""
        return self.learning_rate or DEFAULT_LEARNING_RATES[self.parameters]


class SFTLearner(Passes):
    """The program that trains."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda|npu)(:[0-9]+)?$")] = "cpu"
    """torch device."""
    accelerator: Accelerator | None = None
    """Devices. With a count above 1 each has a process of its own, a rank, and the base model is sharded over them; on
    profile cpu the ranks share the cores. Default: one of profile cpu, nvidia or ascend, by `device`."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one rank. Default: all cores, divided by the ranks."""

    @property
    def ranks(self) -> int:
        """Processes that compute together, each with a device of its own."""
        return 1 if self.accelerator is None else self.accelerator.count


class SFTSpec(Model):
    """Supervised fine-tuning."""

    model: ModelSpec
    data: ConversationData
    training: Training = Training()
    learner: SFTLearner = SFTLearner()
    storage: Storage = Storage()
    template: Annotated[str, Field(min_length=1)] | None = None
    """File of a chat template that replaces the model's own; on a cluster s3://... or pvc://CLAIM/PATH."""
    template_arguments: TemplateArguments = {}
    """Variables of the template, such as `{enable_thinking: false}` of Qwen3's."""


class SFTJob(Model):
    """Supervised fine-tuning of an adapter or of a model, from which reinforcement learning can start."""

    api_version: Literal["kestrl.dev/v1alpha1"]
    kind: Literal["SFTJob"]
    metadata: Metadata
    spec: SFTSpec


def parse_sft_job(document: Any) -> SFTJob:
    """A job from a parsed manifest.

    Raises:
        ProblemsError: With every problem at once.
    """
    job = validated(SFTJob, document)
    learner = job.spec.learner
    offloading = offload_problems(
        offload=learner.activation_offload,
        checkpointing=learner.gradient_checkpointing,
        on_cpu=learner.device.startswith("cpu"),
    )
    problems = [
        *target_problems(job.spec.model.adapter),
        *offloading,
        *checkpointing_problems(layers=learner.checkpointed_layers, checkpointing=learner.gradient_checkpointing),
        *_adapter_problems(job.spec),
        *_rank_problems(job.spec),
    ]
    if problems:
        raise ProblemsError(problems)
    return job


def _rank_problems(spec: SFTSpec) -> Iterator[Problem]:
    """Fields that do not go together with several ranks."""
    learner, field = spec.learner, "spec.learner.accelerator.count"
    if learner.ranks == 1:
        return
    if spec.training.parameters == "all":
        yield Problem(field, f"is {learner.ranks}, and spec.training.parameters: all trains on one device; use 1")
    kind, _, number = learner.device.partition(":")
    if number:
        yield Problem(
            "spec.learner.device",
            f"{learner.device!r} is one device, and {field} is {learner.ranks}: use {kind!r}, of which each rank has "
            "the one with its number",
        )


def _adapter_problems(spec: SFTSpec) -> Iterator[Problem]:
    """Fields of an adapter where there is none. A field with its default is none: API servers fill it in."""
    if spec.training.parameters == "adapter":
        return
    adapter, default = spec.model.adapter.model_dump(by_alias=True), Adapter().model_dump(by_alias=True)
    for name in adapter:
        if adapter[name] != default[name]:
            yield Problem(
                f"spec.model.adapter.{name}", "there is no adapter with spec.training.parameters: all; remove it"
            )


def read_sft_job(path: Path, overrides: tuple[str, ...] = ()) -> SFTJob:
    """The job of a manifest file.

    Raises:
        UserInputError: The file cannot be read.
        ProblemsError: With every problem at once.
    """
    return parse_sft_job(with_overrides(read_kind(path, SFT_KIND), overrides))
