"""Settings of supervised fine-tuning, which `kestrl sft` writes and the learner's program reads."""

from __future__ import annotations

from typing import Any, Literal

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.plan.settings.learner import PolicySettings, RanksOfPods
from kestrl._shared.spec.sft import Conversations, SFTJob

LOSS = "kestrl_learner.sft.loss:CrossEntropy"


class SFTData(SettingsModel):
    """Conversations: a file, or the episodes in a run's storage."""

    path: str | None = None
    episodes: str | None = None
    min_reward: float | None = None
    size: int | None = None


class SFTSettings(PolicySettings, RanksOfPods):
    """One run of supervised fine-tuning."""

    job: str
    temperature: float = 1.0
    parameters: Literal["adapter", "all"] = "adapter"
    """What is trained; the fields of an adapter have no meaning for `all`."""
    template: str | None = None
    """File of a chat template."""
    template_arguments: dict[str, Any] = {}
    """Variables of the template."""
    train: SFTData
    validation: SFTData | None
    epochs: int
    max_steps: int | None
    max_tokens: int
    eval_every: int | None
    checkpoint_every: int
    algorithm: AlgorithmSettings
    storage: str
    """Address of the run's storage."""
    storage_seconds: float = 600.0
    """Time for which storage that does not answer, or denies what it allowed before, is asked again."""
    threads: int | None
    """torch threads of each rank; None leaves torch's choice."""
    python_path: tuple[str, ...] = ()
    ranks_listen: str | None = None
    """None: all ranks are on one machine or in one pod."""
    start_seconds: float = 600.0


def sft_settings(
    job: SFTJob,
    *,
    model: str,
    train: str | None,
    validation: str | None,
    template: str | None,
    storage: str,
) -> SFTSettings:
    """The settings of a job.

    Args:
        job: The manifest.
        model: Folder or Hugging Face id of the base model.
        train: The located file, if the data are one.
        validation: As `train`.
        template: The located file.
        storage: Address of the run's storage.
    """
    spec, training = job.spec, job.spec.training
    adapter = spec.model.adapter
    return SFTSettings(
        job=job.metadata.name,
        parameters=training.parameters,
        model=model,
        dtype=spec.model.dtype,
        rank=adapter.rank,
        alpha=adapter.alpha,
        targets=adapter.targets if isinstance(adapter.targets, str) else tuple(adapter.targets),
        adapter_from=adapter.from_,
        template=template,
        template_arguments=spec.template_arguments,
        train=_data(spec.data.train, train),
        validation=None if spec.data.validation is None else _data(spec.data.validation, validation),
        seed=spec.data.seed,
        epochs=training.epochs,
        max_steps=training.max_steps,
        max_tokens=training.max_tokens,
        eval_every=training.eval_every,
        checkpoint_every=training.checkpoint_every,
        algorithm=AlgorithmSettings(
            name=LOSS,
            group_size=1,
            groups_per_step=training.batch_size,
            learning_rate=training.peak_learning_rate,
            learning_rate_schedule=training.learning_rate_schedule,
            final_learning_rate_share=training.final_learning_rate_share,
            warmup_steps=training.warmup_steps,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            max_grad_norm=training.max_grad_norm,
            clip_low=1.0,
            clip_high=1.0,
            max_staleness=0,
            on_failed_episode="drop",
            min_group_size=1,
            advantage="",
            loss="",
        ),
        storage=storage,
        storage_seconds=spec.storage.retry_timeout,
        threads=spec.learner.threads,
        ranks=spec.learner.ranks,
        device=spec.learner.device,
        gradient_checkpointing=spec.learner.gradient_checkpointing,
        checkpointed_layers=spec.learner.checkpointed_layers,
        activation_offload=spec.learner.activation_offload,
        compile_layers=spec.learner.compile_layers,
        tokens_per_pass=spec.learner.tokens_per_pass,
    )


def _data(data: Conversations, path: str | None) -> SFTData:
    return SFTData(path=path, episodes=data.episodes, min_reward=data.min_reward, size=data.size)
