"""Policy losses on sampled tokens. All tensors are 1-d over the sampled tokens of some rows; sums, so that the caller divides by
the token count of the whole batch (DAPO's token mean, arXiv 2503.14476, needs the *global* count).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before `exp`, as verl does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The trust region of the ratio: [1 - low, 1 + high]."""

    low: float
    high: float


def ppo_clip(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip: Clip, importance_cap: float | None
) -> Tensor:
    """Sum over tokens of -w min(r A, clip(r, 1 - low, 1 + high) A).

    Without a cap ("bypass"): r = exp(logprob - behaviour), w = 1; the ratio holds the whole correction, so none is applied twice.
    With a cap C ("decoupled", one update a batch): the old policy is the current one, r = exp(logprob - sg(logprob)) = 1 with its
    gradient, and w = sg min(exp(logprob - behaviour), C), token-level truncated importance sampling.

    Args:
        logprobs: (N,) under the current weights, with gradient.
        behaviour: (N,) as the engine reported when it sampled.
        advantages: (N,)
        clip: PPO's clip range; clip-higher when high > low (DAPO).
        importance_cap: C, or None.
    """
    drift = (logprobs.detach() - behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if importance_cap is None:
        old, weights = behaviour, torch.ones_like(drift)
    else:
        old, weights = logprobs.detach(), drift.exp().clamp(max=importance_cap)
    ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()


LOSSES = {"ppo_clip": ppo_clip}
