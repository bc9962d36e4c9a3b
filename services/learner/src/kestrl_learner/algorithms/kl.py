"""Estimators of KL(policy || reference) a token, with x = reference - policy log-probability (J. Schulman,
Approximating KL divergence).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

BOUND = 20.0
"""Log-ratios are clamped to this before `exp`, as verl does."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-x: unbiased, may be negative; as a loss term its gradient is that of the log-probability alone."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """x^2 / 2: biased, with the gradient of the KL divergence on policy."""
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(x) - x - 1: unbiased and never negative."""
    x = (reference - logprobs).clamp(-BOUND, BOUND)
    return x.exp() - x - 1.0


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
