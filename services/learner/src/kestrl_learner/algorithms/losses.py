"""Policy losses a token. Each takes a `TokenBatch`, the log-probabilities of the old policy and bounds, and returns a
tensor (N,) that the caller weighs and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrl._shared.spec.algorithms import LOSSES as DECLARED
from kestrl.algorithms import TokenBatch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before `exp`, so that it does not overflow. verl clamps those of `ppo_clip` to the
same bound, and a sequence's of GSPO to 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Settings of a loss."""

    low: float
    """The ratio counts from 1 - low ..."""
    high: float
    """... to 1 + high."""
    dual: float | None = None
    """Dual clip c > 1: a token with a negative advantage costs at most -c A. Source: arXiv 1912.09729."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and with a dual clip at most -c A where A < 0."""
    gains = torch.minimum(ratio * advantages, ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high) * advantages)
    if bounds.dual is not None:
        gains = torch.where(advantages < 0, torch.maximum(gains, bounds.dual * advantages), gains)
    return -gains


def ppo_clip(batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:
    """PPO's clipped surrogate with the ratio of each token; clip-higher where high > low (DAPO). Source: arXiv
    1707.06347.
    """
    return _clipped(bounded(batch.logprobs - old).exp(), batch.advantages, bounds)


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """The sum over each token's episode, (N,)."""
    # As many places as tokens, not episodes, whose number only the device has.
    return torch.zeros_like(values).index_add(0, sequences, values)[sequences]


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean over each token's episode, (N,)."""
    return sequence_sum(values, sequences) / sequence_sum(torch.ones_like(values), sequences)


def gspo(batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:
    """PPO's surrogate with the length-normalised ratio of the episode, s = exp(mean log-ratio).

    A token's ratio is sg[s] pi / sg[pi], so that each token of an episode has the episode's ratio and its own gradient.
    Source: GSPO (arXiv 2507.18071), GSPO-token.
    """
    log_sequence = sequence_mean((batch.logprobs - old).detach(), batch.sequences)
    ratio = bounded(log_sequence + batch.logprobs - batch.logprobs.detach()).exp()
    return _clipped(ratio, batch.advantages, bounds)


def cispo(batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi: every token keeps its gradient. Source: MiniMax-M1 (arXiv
    2506.13585).
    """
    ratio = bounded(batch.logprobs - old).exp().detach().clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return -ratio * batch.advantages * batch.logprobs


def sapo(
    batch: TokenBatch,
    old: Tensor,
    bounds: Bounds,  # noqa: ARG001 - a soft gate
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> Tensor:
    """-f(r) A with the soft gate f(r) = 4 / t sigmoid(t (r - 1)), where t is `positive` for A > 0 and else `negative`.
    Source: SAPO (arXiv 2511.20347).
    """
    ratio = bounded(batch.logprobs - old).exp()
    # torch.where of two numbers is float32 whatever the advantages are.
    rewarded = (batch.advantages > 0).to(ratio.dtype)
    temperature = negative + (positive - negative) * rewarded
    return -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * batch.advantages


def dppo_tv(
    batch: TokenBatch,
    old: Tensor,  # noqa: ARG001 - mu in its place
    bounds: Bounds,  # noqa: ARG001 - a trust region of its own
    *,
    bound: float = 0.2,
    penalty: float = 1e-3,
) -> Tensor:
    """-keep A pi / mu + penalty log^2(pi / mu); a token is dropped where pi - mu moved by more than `bound` along its
    advantage.

    mu is the behaviour policy, so that no importance weight applies. Source: DPPO-TV (arXiv 2602.04879), prime-rl.
    """
    log_ratio = bounded(batch.logprobs - batch.behaviour)
    moved = (batch.logprobs.exp() - batch.behaviour.exp()).detach() * batch.advantages.sign()
    keep = (moved <= bound).to(log_ratio.dtype)
    return -keep * batch.advantages * log_ratio.exp() + penalty * log_ratio**2


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
}


def clipped(loss: str, batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:
    """1.0 on tokens whose ratio in the loss lies beyond the bound that their advantage moves it to, else 0.0."""
    log_ratio = batch.logprobs - old
    if DECLARED[loss].of_episodes:
        log_ratio = sequence_mean(log_ratio, batch.sequences)
    ratio, advantages = bounded(log_ratio).exp(), batch.advantages
    beyond = ((advantages > 0) & (ratio > 1.0 + bounds.high)) | ((advantages < 0) & (ratio < 1.0 - bounds.low))
    return beyond.to(ratio.dtype)
