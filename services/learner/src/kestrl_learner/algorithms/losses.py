"""Policy losses a token. Each takes a `TokenBatch`, the log-probabilities of the old policy and bounds, and returns a
tensor (N,) that the caller weighs and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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


SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05
"""Temperatures of the gate for A > 0 and A <= 0."""


def sapo(batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:  # noqa: ARG001 - a soft gate
    """-f(r) A with the soft gate f(r) = 4 / t sigmoid(t (r - 1)), t by the sign of A. Source: SAPO (arXiv
    2511.20347).
    """
    ratio = bounded(batch.logprobs - old).exp()
    # torch.where of two numbers is float32 whatever the advantages are.
    positive = (batch.advantages > 0).to(ratio.dtype)
    temperature = SAPO_NEGATIVE + (SAPO_POSITIVE - SAPO_NEGATIVE) * positive
    return -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * batch.advantages


DPPO_BOUND = 0.2
"""Largest change of a token's probability in the direction of its advantage."""
DPPO_PENALTY = 1e-3


def dppo_tv(batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:  # noqa: ARG001 - mu and a fixed trust region
    """-keep A pi / mu + 1e-3 log^2(pi / mu); a token is dropped where pi - mu moved by more than 0.2 along its
    advantage.

    mu is the behaviour policy, so that no importance weight applies. Source: DPPO-TV (arXiv 2602.04879), prime-rl.
    """
    log_ratio = bounded(batch.logprobs - batch.behaviour)
    moved = (batch.logprobs.exp() - batch.behaviour.exp()).detach() * batch.advantages.sign()
    keep = (moved <= DPPO_BOUND).to(log_ratio.dtype)
    return -keep * batch.advantages * log_ratio.exp() + DPPO_PENALTY * log_ratio**2


LOSSES: dict[str, Callable[[TokenBatch, Tensor, Bounds], Tensor]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
}

AGAINST_BEHAVIOUR = frozenset({"dppo_tv"})
"""Losses whose ratio is always to the behaviour policy, so that no importance weight applies."""


OF_EPISODES = frozenset({"gspo"})
"""Losses whose ratio is that of the whole episode."""


def clipped(loss: str, batch: TokenBatch, old: Tensor, bounds: Bounds) -> Tensor:
    """1.0 on tokens whose ratio in the loss lies beyond the bound that their advantage moves it to, else 0.0."""
    log_ratio = batch.logprobs - old
    if loss in OF_EPISODES:
        log_ratio = sequence_mean(log_ratio, batch.sequences)
    ratio, advantages = bounded(log_ratio).exp(), batch.advantages
    beyond = ((advantages > 0) & (ratio > 1.0 + bounds.high)) | ((advantages < 0) & (ratio < 1.0 - bounds.low))
    return beyond.to(ratio.dtype)
