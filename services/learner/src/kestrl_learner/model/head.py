"""Log-probabilities of tokens from hidden states, some tokens at a time, so that the logits of a batch never exist as a
whole: those of 16,384 tokens over a vocabulary of 152,000 would take 10 GB in float32, and as much for their gradient.
"""
# torch's annotations of autograd functions are partial; everything here is annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = {"cpu": 2**24}
"""Largest number of logits that exist at a time, by the type of the device: 64 MiB in float32, and as much for their
softmax."""
DEVICE_LOGITS_AT_ONCE = 2**26
"""Largest number of logits on other devices, 256 MiB: 441 tokens of a vocabulary of 152,000. For 110 a device in
bfloat16 reads the head's weights for longer than it multiplies: some 300 operations for each byte that it can read are
usual."""


def logits_at_once(device_type: str) -> int:
    """Largest number of logits that exist at a time on a type of device."""
    return LOGITS_AT_ONCE.get(device_type, DEVICE_LOGITS_AT_ONCE)


def token_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropies: list[Tensor] | None = None,
    *,
    at_once: int,
) -> Tensor:
    """Log-probabilities softmax(head(hidden) / temperature) of the targets, (N,), in float32 or a larger precision of
    the head.

    Args:
        head: Maps hidden states to logits.
        hidden: (N, hidden size).
        targets: (N,) token ids.
        temperature: Divisor of the logits.
        entropies: If given, the entropy of each token's distribution is appended, (N,), in nats, without gradient.
        at_once: Largest number of logits that exist at a time; a token's are never divided.
    """
    if type(head) is nn.Linear and not any(weight.requires_grad for weight in head.parameters()):
        logprobs, entropy = cast(
            "tuple[Tensor, Tensor]",
            _FrozenHead.apply(hidden, head.weight, head.bias, targets, temperature, entropies is not None, at_once),
        )
    else:
        logprobs, entropy = _trained_head(head, hidden, targets, temperature, at_once)
    if entropies is not None:
        entropies.append(entropy.detach())
    return logprobs


def _rows(vocabulary: int, at_once: int) -> int:
    return max(1, at_once // vocabulary)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


class _FrozenHead(torch.autograd.Function):
    """With frozen weights W the gradient of a token's log-probability for its hidden state is
    (W[target] - softmax W) / temperature, which depends on that token alone: it is computed beside the log-probability
    and kept in place of the logits, and the backward pass scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        at_once: int,
    ) -> tuple[Tensor, Tensor]:
        count, needs_gradient = len(hidden), ctx.needs_input_grad[0]
        logprobs = hidden.new_empty(count, dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        slopes = torch.empty_like(hidden) if needs_gradient else None
        size = _rows(weight.shape[0], at_once)
        for start in range(0, count, size):
            part = slice(start, min(count, start + size))
            logits = _scaled(nn.functional.linear(hidden[part], weight, bias), temperature)
            total = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - total
            if not (with_entropy or needs_gradient):
                continue
            chances = (logits - total[:, None]).exp_()
            if with_entropy:
                entropy[part] = total - torch.linalg.vecdot(chances, logits)
            if slopes is not None:
                slopes[part] = (weight[targets[part]] - chances.to(weight.dtype) @ weight) / temperature
        ctx.slopes = slopes
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slopes: Tensor = ctx.slopes
        return gradients[0][:, None].to(slopes.dtype) * slopes, None, None, None, None, None, None


def _trained_head(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, at_once: int
) -> tuple[Tensor, Tensor]:
    """As `_FrozenHead`, for a head with weights under training: logits are computed again in the backward pass."""

    def part_of(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        distribution = torch.log_softmax(_scaled(head(states), temperature), dim=-1)
        entropy = -torch.linalg.vecdot(distribution.exp(), distribution)
        return distribution.gather(-1, ids[:, None])[:, 0], entropy

    size = _rows(cast("int", getattr(head, "out_features", 2**17)), at_once)
    parts: list[tuple[Tensor, Tensor]] = [
        checkpoint(part_of, hidden[start : start + size], targets[start : start + size], use_reentrant=False)
        for start in range(0, max(1, len(hidden)), size)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
