"""`spec.algorithm`, and the built-in algorithms as data: the parts of an algorithm by name, and the presets that bundle
them.

The learner implements each part under the same name; a contract test compares the two lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from kestrl._shared.spec.model import Model, NonNegative, NonNegativeInt, Positive, listed
from kestrl._shared.spec.scalars import JsonObject

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "maxrl", "gdpo")
OF_COMPONENTS = frozenset({"gdpo"})
"""Advantage estimators that compare each component of the reward, not the total."""
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTION_WEIGHTS = ("none", "token", "sequence", "icepop")
REJECTIONS = ("none", "geometric", "k3")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")


class LossConfig(BaseModel):
    """Base of `algorithm.lossConfig`: the keyword arguments of a loss."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SapoConfig(LossConfig):
    """Temperatures of the soft gate of `sapo`."""

    positive: Positive = 1.0
    """Where the advantage is positive."""
    negative: Positive = 1.05
    """Elsewhere."""


class DppoConfig(LossConfig):
    """The trust region of `dppo_tv`."""

    bound: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Largest change of a token's probability in the direction of its advantage."""
    penalty: NonNegative = 1e-3
    """Coefficient of the squared log-ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss as a manifest knows it. The learner implements it under the same name."""

    config: type[LossConfig] | None = None
    """None if it takes no `lossConfig`."""
    against_behaviour: bool = False
    """Whether its ratio is always to the behaviour policy, so that no importance weight applies."""
    of_episodes: bool = False
    """Whether its ratio is that of the whole episode."""


LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(),
    "gspo": PolicyLoss(of_episodes=True),
    "cispo": PolicyLoss(),
    "sapo": PolicyLoss(config=SapoConfig),
    "dppo_tv": PolicyLoss(config=DppoConfig, against_behaviour=True),
}
_CONFIGURED = listed({name: ", ".join(loss.config.model_fields) for name, loss in LOSSES.items() if loss.config})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Named defaults of parts and their settings, each of which the manifest can override."""

    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dynamic_sampling: bool = False
    """Whether groups with equal rewards are replaced."""
    source: str
    """Paper or implementation of the preset."""


PRESETS: dict[str, Preset] = {
    "grpo": Preset(source="arXiv 2402.03300, with the token mean and clip-higher of DAPO (arXiv 2503.14476)"),
    "dapo": Preset(dynamic_sampling=True, source="arXiv 2503.14476"),
    "dr_grpo": Preset(
        advantage="dr_grpo",
        aggregation="seq_mean_token_sum_norm",
        clip_high=0.2,
        source="arXiv 2503.20783",
    ),
    "gspo": Preset(
        loss="gspo",
        aggregation="seq_mean_token_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        source="arXiv 2507.18071",
    ),
    "cispo": Preset(
        loss="cispo", clip_low=1.0, clip_high=4.0, source="arXiv 2506.13585; the bounds are ART's, clip(ratio, 0, 5)"
    ),
    "rloo": Preset(advantage="rloo", source="arXiv 2402.14740"),
    "reinforce++": Preset(
        advantage="reinforce++", clip_high=0.2, source="arXiv 2501.03262, the variant with a group baseline"
    ),
    "gdpo": Preset(advantage="gdpo", clip_high=0.2, source="arXiv 2601.05242"),
}

_IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
_PATTERN = rf"^({'|'.join(re.escape(name) for name in PRESETS)}|{_IMPORT_PATH})$"


def one_of(names: Sequence[str]) -> Any:
    """Annotations of a string field that takes one of these names."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is unknown; use one of {', '.join(names)}")
        return value

    return (AfterValidator(check), WithJsonSchema({"type": "string", "enum": list(names)}))


def _check_name(value: str) -> str:
    if not re.match(_PATTERN, value):
        raise ValueError(
            f"{value!r} is neither a preset ({', '.join(PRESETS)}) nor a class by import path (module:Class)"
        )
    return value


AlgorithmName = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": _PATTERN})]
AdvantageName = Annotated[str, *one_of(ADVANTAGES)]
LossName = Annotated[str, *one_of(tuple(LOSSES))]
AggregationName = Annotated[str, *one_of(AGGREGATIONS)]
KlEstimatorName = Annotated[str, *one_of(KL_ESTIMATORS)]
CorrectionWeightsName = Annotated[str, *one_of(CORRECTION_WEIGHTS)]
RejectionName = Annotated[str, *one_of(REJECTIONS)]
LearningRateScheduleName = Annotated[str, *one_of(LEARNING_RATE_SCHEDULES)]


class Clip(Model):
    """Clip range of the ratio: [1 - low, 1 + high]. Defaults are those of the preset."""

    low: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    """Distance of the lower bound from 1; 1 means no lower bound."""
    high: Positive | None = None
    """Distance of the upper bound from 1; a value above `low` lets unlikely tokens increase more (DAPO's
    clip-higher)."""
    dual: Annotated[float, Field(gt=1, strict=False)] | None = None
    """Dual clip c: the loss of a token with a negative advantage A is at most -c A. Default: none."""


class Kl(Model):
    """A penalty on the distance from the base model (the adapter switched off)."""

    coefficient: NonNegative = 0.0
    """Coefficient of the penalty; above 0, a step needs one more forward pass for reference log-probabilities."""
    estimator: KlEstimatorName = "k3"
    """Estimator of the KL divergence per token; k2 has the exact gradient on policy."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds the penalty of each token to the loss; `reward` subtracts the sum over an episode's tokens from its
    reward before advantages are estimated, with the sampling policy in place of the current one."""


class Correction(Model):
    """Correction for the difference between the policy that sampled a token (mu, as the engine reports it) and the one
    that the step begins with (old).
    """

    mode: Literal["bypass", "decoupled"] | None = None
    """`bypass`: the ratio of the loss is policy / mu, which holds the whole correction. `decoupled`: policy / old, and
    `weights` of old / mu are applied. Default: decoupled if maxStaleness is above 0, a step has several updates or the
    clip or rejection range is narrower than the accepted log-prob gap, as GSPO's is."""
    weights: CorrectionWeightsName = "token"
    """Decoupled: `token` is min(old / mu, cap), `sequence` the same with the episode's product, `icepop` is old / mu
    within [low, high] and 0 elsewhere."""
    cap: Positive = 2.0
    """Bound C of truncated importance weights (`token`, `sequence`)."""
    low: NonNegative = 0.5
    """Lower bound of `icepop`."""
    high: Positive = 2.0
    """Upper bound of `icepop`."""
    reject: RejectionName = "none"
    """Episodes that are left out, in either mode: `geometric` if the geometric mean of old / mu is outside
    [rejectBelow, rejectAbove], `k3` if the mean of the KL estimate k3 is above rejectKl."""
    reject_below: NonNegative = 0.999
    """Lower bound of `geometric`."""
    reject_above: Positive = 1.001
    """Upper bound of `geometric`."""
    reject_kl: Positive = 0.01
    """Upper bound of `k3`, in nats per token."""


class Algorithm(Model):
    """The training algorithm."""

    name: Annotated[
        AlgorithmName,
        Field(description=f"A preset ({listed(dict.fromkeys(PRESETS, ''))}), or the import path of a class."),
    ] = "grpo"
    config: JsonObject = {}
    """Keyword arguments of a class by import path."""
    advantage: AdvantageName | None = None
    """Advantage estimator. Default: the preset's."""
    loss: LossName | None = None
    """Policy loss. Default: the preset's."""
    loss_config: Annotated[JsonObject, Field(description=f"Parameters of the loss: {_CONFIGURED}.")] = {}
    aggregation: AggregationName | None = None
    """Aggregation of token losses over the whole batch. Default: the preset's. The horizon of `..._norm` is
    agent.maxTokens."""
    kl: Kl = Kl()
    dynamic_sampling: bool | None = None
    """Whether groups with equal rewards are replaced by groups of other scenarios. Default: the preset's."""
    max_sampled_batches: Annotated[int, Field(ge=1, le=1000)] = 10
    """With dynamic sampling: the run fails when one step has refused as many groups as this many batches contain."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Episodes per scenario."""
    groups_per_step: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Scenarios per optimiser step."""
    learning_rate: Positive = 1.2e-5
    """Learning rate of AdamW after the warm-up."""
    learning_rate_schedule: LearningRateScheduleName = "constant"
    """Learning rate after the warm-up: constant, or falling to `finalLearningRateShare` over the remaining steps."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    """Learning rate of the last step as a share of `learningRate`, for `linear` and `cosine`."""
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimiser updates in one pass over the groups of a step, each with an equal share of them."""
    mini_batch_epochs: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over the groups of a step, as PPO's epochs."""
    clip: Clip = Clip()
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Maximum age in steps of a group in training. 0 alternates sampling and training; above 0, they overlap."""
    on_failed_episode: Literal["drop", "shrink"] = "drop"
    """When an episode fails for a reason other than the policy: drop its group, or continue with the other episodes."""
    min_group_size: Annotated[int, Field(ge=1, le=1024)] = 2
    """With `shrink`: a group with fewer episodes is dropped."""
    max_failed_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.2
    """Maximum share of a step's episodes that fail for reasons other than the policy; above it the run stops."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient, which is scaled down to it."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.99
    """Decay of AdamW's mean of squared gradients."""
    correction: Correction = Correction()
    logprob_gap_bound: Positive | None = None
    """Maximum mean log-prob gap between learner and engine on policy, in nats a token. Default: 1e-3 in float32, 0.1 in
    bfloat16. The bounds of the 99th percentile, the maximum and the effective sample size are derived from it."""
