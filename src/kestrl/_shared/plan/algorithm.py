"""Settings of the training algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

TOKEN_BOUND = 4
"""Largest age of a trained token of a group that continues over updates, in times of `max_staleness`: lower bounds mask
mostly the longest episodes (`benchmarks.stale_groups`)."""


class CorrectionSettings(BaseModel, frozen=True, extra="forbid"):
    """Correction for the behaviour policy."""

    decoupled: bool = False
    """Whether the old policy is the one that the step begins with, rather than the behaviour policy."""
    weights: str = "none"
    """Importance weights of old / behaviour; `none` in bypass mode."""
    cap: float = 2.0
    low: float = 0.5
    high: float = 2.0
    reject: str = "none"
    reject_below: float = 0.999
    reject_above: float = 1.001
    reject_kl: float = 0.01


class AlgorithmSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of the training algorithm."""

    name: str
    """Name of a preset, or import path of a class."""
    group_size: int
    groups_per_step: int
    learning_rate: float
    clip_low: float
    clip_high: float
    max_staleness: int
    stale_groups: Literal["release", "wait", "continue"] = "release"
    """Handling of a running group that the next version would make too old."""
    on_failed_episode: Literal["drop", "shrink"]
    min_group_size: int
    max_grad_norm: float
    weight_decay: float
    warmup_steps: int
    advantage: str
    loss: str
    loss_config: dict[str, Any] = {}
    """Keyword arguments of the loss."""
    correction: CorrectionSettings = CorrectionSettings()
    learning_rate_schedule: str = "constant"
    final_learning_rate_share: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    mini_batches: int = 1
    """Optimiser updates in one pass over the groups of a step."""
    mini_batch_epochs: int = 1
    config: dict[str, Any] = {}
    """Keyword arguments of a class by import path."""
    aggregation: str = "token_mean"
    horizon: int = 1
    """Divisor of `seq_mean_token_sum_norm` in tokens."""
    clip_dual: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_place: Literal["loss", "reward"] = "loss"
    dynamic_sampling: bool = False
    max_sampled_batches: int = 10

    @property
    def continues(self) -> bool:
        """Whether newer versions sample the later turns of a running group."""
        return self.stale_groups == "continue"

    @property
    def token_staleness(self) -> int:
        """Largest age in steps of a token that is trained on."""
        return self.max_staleness * (TOKEN_BOUND if self.continues else 1)
