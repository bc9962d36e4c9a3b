"""What an update computes: the settings of the algorithm, and the accepted difference between the log-probs of learner
and engine. Pure.
"""

from __future__ import annotations

import math

from kestrl._shared.plan.algorithm import AlgorithmSettings, CorrectionSettings
from kestrl._shared.plan.settings.learner import GapBounds
from kestrl._shared.spec.algorithms import PRESETS
from kestrl._shared.spec.job import JobSpec

GAP_BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean |learner - engine| log-prob difference in nats, by dtype (measured: float32 1e-6, bfloat16 0.01)."""
GAP_SPREAD = 10.0
"""Factor from the bound of the mean to that of the 99th percentile; the bound of the maximum has its square."""


def algorithm_settings(spec: JobSpec) -> AlgorithmSettings:
    """Algorithm settings of the learner: the preset with the overrides of the manifest."""
    algorithm = spec.algorithm
    preset = PRESETS.get(algorithm.name, PRESETS["grpo"])
    clip, dynamic = algorithm.clip, algorithm.dynamic_sampling
    return AlgorithmSettings(
        name=algorithm.name,
        config=dict(algorithm.config),
        group_size=algorithm.group_size,
        groups_per_step=algorithm.groups_per_step,
        learning_rate=algorithm.learning_rate,
        clip_low=preset.clip_low if clip.low is None else clip.low,
        clip_high=preset.clip_high if clip.high is None else clip.high,
        clip_dual=clip.dual,
        max_staleness=algorithm.max_staleness,
        stale_groups=spec.schedule.stale_groups,
        on_failed_episode=algorithm.on_failed_episode,
        min_group_size=algorithm.min_group_size,
        max_grad_norm=algorithm.max_grad_norm,
        weight_decay=algorithm.weight_decay,
        warmup_steps=algorithm.warmup_steps,
        advantage=algorithm.advantage or preset.advantage,
        loss=algorithm.loss or preset.loss,
        loss_config=dict(algorithm.loss_config),
        aggregation=algorithm.aggregation or preset.aggregation,
        horizon=spec.agent.max_tokens,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
        kl_place=algorithm.kl.place,
        dynamic_sampling=preset.dynamic_sampling if dynamic is None else dynamic,
        max_sampled_batches=algorithm.max_sampled_batches,
        correction=_correction(spec),
        learning_rate_schedule=algorithm.learning_rate_schedule,
        final_learning_rate_share=algorithm.final_learning_rate_share,
        adam_beta1=algorithm.adam_beta1,
        adam_beta2=algorithm.adam_beta2,
        mini_batches=algorithm.mini_batches,
        mini_batch_epochs=algorithm.mini_batch_epochs,
    )


def gap_bounds(mean: float) -> GapBounds:
    """All bounds of the log-prob gap, from that of its mean. A spread of s nats leaves about 1 / (1 + s^2) of the
    effective sample size.
    """
    spread = GAP_SPREAD * mean
    return GapBounds(mean=mean, p99=spread, max=GAP_SPREAD * spread, ess=1 / (1 + spread**2))


def accepted_gap(spec: JobSpec) -> float:
    """Largest accepted mean difference of the log-probs of learner and engine, in nats a token."""
    return spec.algorithm.logprob_gap_bound or GAP_BOUND[spec.model.dtype]


def narrow_window(spec: JobSpec) -> str:
    """The field of a clip or rejection range that is narrower than the accepted gap between learner and engine; empty
    if none is. A ratio to the engine's log-probs would leave it by rounding alone.
    """
    clip, correction = spec.algorithm.clip, spec.algorithm.correction
    preset = PRESETS.get(spec.algorithm.name)
    bounds: dict[str, float] = {}
    if preset is not None:
        bounds["clip.low"] = preset.clip_low if clip.low is None else clip.low
        bounds["clip.high"] = preset.clip_high if clip.high is None else clip.high
    if correction.reject == "geometric":
        bounds["correction.rejectBelow"] = 1 - correction.reject_below
        bounds["correction.rejectAbove"] = correction.reject_above - 1
    elif correction.reject == "k3":
        bounds["correction.rejectKl"] = math.sqrt(2 * correction.reject_kl)  # of a gap d, k3 is about d^2 / 2
    gap = accepted_gap(spec)
    return next((name for name, width in bounds.items() if width < gap and not math.isclose(width, gap)), "")


def _correction(spec: JobSpec) -> CorrectionSettings:
    algorithm, correction = spec.algorithm, spec.algorithm.correction
    several = algorithm.mini_batches * algorithm.mini_batch_epochs > 1
    needed = algorithm.max_staleness > 0 or several or bool(narrow_window(spec))
    decoupled = needed if correction.mode is None else correction.mode == "decoupled"
    return CorrectionSettings(
        decoupled=decoupled,
        weights=correction.weights if decoupled else "none",
        cap=correction.cap,
        low=correction.low,
        high=correction.high,
        reject=correction.reject,
        reject_below=correction.reject_below,
        reject_above=correction.reject_above,
        reject_kl=correction.reject_kl,
    )
