"""The learner's peak memory: what is asked of its program, what it answers, and whether a device holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.plan.settings.learner import PolicySettings
from kestrl._shared.plan.site import BUILDS
from kestrl._shared.plan.updates import algorithm_settings
from kestrl._shared.spec.job import AgentRLJob, Learner, ModelSpec
from kestrl._shared.spec.sft import SFTJob, SFTLearner

GIB = 2**30
MARGIN = 0.10
"""Share of the estimate that a device must have in addition: the estimate was within it of measured peaks."""
WORTH_CHANGING = 0.05
"""Share of the total below which a part is not worth a change."""

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Variables with which glibc gives freed tensors back. By itself it keeps them in pieces that later tensors do not fit:
steps of SmolLM2 took up to twice the memory of their tensors.
"""


class MemoryPart(StrEnum):
    """What memory is used for."""

    BASE = "base weights"
    """Whole, or with several ranks a share of each layer."""
    GATHERED = "gathered layers"
    """With several ranks: layers that are whole while they are computed, and what gathers the next one."""
    ADAPTER = "adapter"
    ROUNDED = "adapter in bfloat16"
    """Copies of the adapter that passes compute with."""
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGPROBS = "log-probs"
    """Logits of some tokens at a time, and what the backward pass needs of them."""
    COPIES = "adapter copies"
    """Versions whose rollouts may be trained on (host memory), and the state before a step of several updates."""
    PROGRAM = "program"
    """The program itself: torch with its libraries, or the context of a device."""


class MemorySettings(SettingsModel):
    """One step of a job, for the estimate."""

    policy: PolicySettings
    parameters: Literal["adapter", "all"] = "adapter"
    """What is trained."""
    kind: Literal["AgentRLJob", "SFTJob"]
    prompt: int
    """Tokens of a row before the first sampled one."""
    completion: int
    """Sampled tokens of a row; observations count as such."""
    group_rows: int
    """Rows of a group, or conversations of an SFT step."""
    groups: int
    """Groups of a step."""
    published: int
    """Versions that the learner keeps beside the current one."""
    several_updates: bool
    """Whether a step has several updates."""
    ranks: int = 1
    """Processes that share the layers of the base and the passes of a step."""


class MemoryEstimate(SettingsModel):
    """Bytes at the moment of the peak, on one rank."""

    parts: dict[MemoryPart, int]
    rows: int
    """Rows of the largest pass."""
    host: int = 0
    """Bytes of host memory that hold offloaded activations."""
    layers: int = 0
    """Layers that gradient checkpointing may apply to."""
    cached_token: int = 0
    """Bytes that an engine's KV cache takes for a token, in the precision of the model."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, device_bytes: float) -> bool:
        """Whether a device holds the estimate and the margin."""
        return self.total * (1 + MARGIN) <= device_bytes


def memory_settings(job: AgentRLJob | SFTJob, *, model: str, row: tuple[int, int] | None) -> MemorySettings:
    """The step of a job with the longest rows that its manifest allows, or with the given ones.

    Args:
        job: The manifest.
        model: Folder or Hugging Face id of the base model.
        row: Tokens of a prompt and of a completion. Default: all of `inference.contextLength` or `training.maxTokens`.
    """
    return _of_sft(job, model, row) if isinstance(job, SFTJob) else _of_rl(job, model, row)


def _of_rl(job: AgentRLJob, model: str, row: tuple[int, int] | None) -> MemorySettings:
    spec, algorithm = job.spec, algorithm_settings(job.spec)
    sampled = min(spec.agent.max_tokens, spec.inference.context_length - 1)  # an episode may have several rows
    prompt, completion = row or (spec.inference.context_length - sampled, sampled)
    build = BUILDS.get(spec.learner.accelerator.profile)
    return MemorySettings(
        policy=_policy(
            spec.model,
            model,
            device=build.device if build else spec.learner.accelerator.profile,
            learner=spec.learner,
        ),
        kind="AgentRLJob",
        prompt=prompt,
        completion=completion,
        group_rows=algorithm.group_size,
        groups=algorithm.groups_per_step,
        published=algorithm.token_staleness + 1 if algorithm.max_staleness else 0,
        several_updates=algorithm.mini_batches * algorithm.mini_batch_epochs > 1,
        ranks=spec.learner.replicas * spec.learner.accelerator.count,
    )


def _of_sft(job: SFTJob, model: str, row: tuple[int, int] | None) -> MemorySettings:
    spec = job.spec
    prompt, completion = row or (1, spec.training.max_tokens - 1)
    return MemorySettings(
        policy=_policy(
            spec.model,
            model,
            device=spec.learner.device,
            learner=spec.learner,
        ),
        parameters=spec.training.parameters,
        kind="SFTJob",
        prompt=prompt,
        completion=completion,
        group_rows=spec.training.batch_size,
        groups=1,
        published=0,
        several_updates=False,
        ranks=spec.learner.ranks,
    )


def _policy(spec: ModelSpec, model: str, *, device: str, learner: Learner | SFTLearner) -> PolicySettings:
    targets = spec.adapter.targets
    return PolicySettings(
        model=model,
        dtype=spec.dtype,
        rank=spec.adapter.rank,
        alpha=spec.adapter.alpha,
        targets=targets if isinstance(targets, str) else tuple(targets),
        seed=0,
        device=device,
        gradient_checkpointing=learner.gradient_checkpointing,
        checkpointed_layers=learner.checkpointed_layers,
        activation_offload=learner.activation_offload,
        tokens_per_pass=learner.tokens_per_pass,
    )


def changes(step: MemorySettings, estimate: MemoryEstimate) -> Sequence[str]:
    """Fields that lower the peak, with their values, those of the largest part first."""
    parts = estimate.parts
    trained = (MemoryPart.ADAPTER, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER, MemoryPart.COPIES)
    candidates = [
        (parts.get(MemoryPart.BASE, 0), _base_change(step)),
        (sum(parts.get(part, 0) for part in trained), _trained_change(step)),
        (parts.get(MemoryPart.ACTIVATIONS, 0) + parts.get(MemoryPart.LOGPROBS, 0), _activation_change(step, estimate)),
    ]
    candidates.sort(key=lambda item: -item[0])
    return [f"{text} ({size / GIB:.2f} GiB)" for size, text in candidates if size >= WORTH_CHANGING * estimate.total]


def checkpointed(step: MemorySettings, layers: int) -> MemorySettings:
    """The step with gradient checkpointing of its first layers only."""
    return step.model_copy(update={"policy": step.policy.model_copy(update={"checkpointed_layers": layers})})


def fewest_checkpointed(*, all_layers: MemoryEstimate, one_layer: MemoryEstimate, device_bytes: float) -> int:
    """The least number of checkpointed layers with which a step fits, for a peak that is linear in it.

    Args:
        all_layers: The peak with all layers checkpointed.
        one_layer: The peak with the first layer checkpointed.
        device_bytes: Memory of the device.
    """
    excess = one_layer.total - device_bytes / (1 + MARGIN)
    of_layer = (one_layer.total - all_layers.total) / max(1, all_layers.layers - 1)
    if excess <= 0 or of_layer <= 0:
        return 1
    return min(all_layers.layers, 1 + math.ceil(excess / of_layer))


def _trained_change(step: MemorySettings) -> str:
    if step.parameters == "all":
        return "spec.training.parameters is all: adapter trains few parameters"
    policy = step.policy
    return (
        f"spec.model.adapter.rank is {policy.rank} and its targets are {_listed(policy.targets)}: lower the rank or "
        "name fewer targets"
    )


def _base_change(step: MemorySettings) -> str:
    if step.parameters == "adapter" and step.policy.dtype == "float32":
        return "spec.model.dtype is float32: bfloat16 halves the base weights"
    ranks = ", or more ranks with spec.learner.accelerator.count" if step.parameters == "adapter" else ""
    return f"spec.model.base: use a smaller model{ranks}"


def _activation_change(step: MemorySettings, estimate: MemoryEstimate) -> str:
    if not step.policy.gradient_checkpointing:
        return "spec.learner.gradientCheckpointing is false: true keeps the inputs of layers only"
    if step.policy.checkpointed_layers is not None:
        return f"spec.learner.checkpointedLayers is {step.policy.checkpointed_layers}: name more, or remove it for all"
    if estimate.rows > 1:
        return f"spec.learner.tokensPerPass is {step.policy.tokens_per_pass} ({estimate.rows} rows in a pass): lower it"
    fields = (
        "spec.training.maxTokens" if step.kind == "SFTJob" else "spec.inference.contextLength and spec.agent.maxTokens"
    )
    return f"{fields}: a pass holds one row of {step.prompt + step.completion} tokens already; shorten it"


def _listed(targets: str | Sequence[str]) -> str:
    return targets if isinstance(targets, str) else ", ".join(targets)
