"""Correction for the behaviour policy: importance weights of old / behaviour, and episodes that are left out.

Weights carry no gradient. Sequence statistics are over an episode, all of whose tokens are in a micro-batch. A token
that is left out has weight 0 and stays in the counts of the aggregation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kestrl._shared.plan.algorithm import CorrectionSettings
from kestrl_learner.algorithms.losses import bounded, sequence_mean, sequence_sum

Weights = Callable[[Tensor, Tensor, CorrectionSettings], Tensor]
"""(log(old / behaviour), episode of each token, settings) -> weight of each token, (N,)."""


def uniform(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:  # noqa: ARG001
    """1."""
    return torch.ones_like(log_ratio)


def token_truncated(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:  # noqa: ARG001
    """min(rho_t, C). Source: truncated importance sampling (fengyao.notion.site/off-policy-rl)."""
    return bounded(log_ratio).exp().clamp(max=settings.cap)


def sequence_truncated(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:
    """min(product of rho over the episode, C)."""
    return bounded(sequence_sum(log_ratio, sequences)).exp().clamp(max=settings.cap)


def icepop(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:  # noqa: ARG001
    """rho_t within [low, high], 0 elsewhere. Source: IcePop (Ring-1T, arXiv 2510.18855)."""
    ratio = bounded(log_ratio).exp()
    return torch.where((ratio >= settings.low) & (ratio <= settings.high), ratio, 0.0)


def keep_all(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:  # noqa: ARG001
    return torch.ones_like(log_ratio)


def geometric(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:
    """1 on episodes whose geometric mean of rho, exp(mean log rho), is within the bounds. Unlike a product, it does not
    depend on the length of an episode.
    """
    mean = bounded(sequence_mean(log_ratio, sequences)).exp()
    return ((mean >= settings.reject_below) & (mean <= settings.reject_above)).to(log_ratio.dtype)


def k3(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> Tensor:
    """1 on episodes whose mean of rho - log rho - 1 is at most the bound."""
    bounded_ratio = bounded(log_ratio)
    divergence = bounded_ratio.exp() - bounded_ratio - 1.0
    return (sequence_mean(divergence, sequences) <= settings.reject_kl).to(log_ratio.dtype)


CORRECTION_WEIGHTS: dict[str, Weights] = {
    "none": uniform,
    "token": token_truncated,
    "sequence": sequence_truncated,
    "icepop": icepop,
}
REJECTIONS: dict[str, Weights] = {"none": keep_all, "geometric": geometric, "k3": k3}
