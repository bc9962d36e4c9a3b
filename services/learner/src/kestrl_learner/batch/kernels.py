"""Whether packed rows have the states and the gradient that each has by itself, and the kernel that computes them."""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kestrl_learner.batch import packing
from kestrl_learner.batch.packing import Kernel, PackedRows

log = logging.getLogger(__name__)
LEAST_WIDTH = 16
"""Least width of a head that FlexAttention computes on CUDA."""
FIRST = PackedRows([1, 2, 3, 4, 5, 6], [[7, 8, 9], [10, 11, 12, 13]])
SECOND = PackedRows([14, 15, 16], [[17, 18], [19, 20, 21], [22]])
"""Rows behind two prompts, by which a kernel is tried."""


def exact(body: nn.Module, device: torch.device) -> bool:
    """Whether two packed rows have the states that each has by itself; the log says why not."""
    packed = [PackedRows([], [[1, 2, 3, 4, 5], [6, 7, 8]])]
    with torch.no_grad():
        problem = _difference(body, packed, lambda: packing.packed_hidden(body, packed, device), device)
    if problem:
        log.info("rows are padded and not packed: %s", problem)
    return not problem


def sharing_kernel(body: nn.Module, device: torch.device) -> Kernel | None:
    """The kernel by which rows behind shared prompts have the states and the gradient that each has by itself; None if
    there is none. The log says which, and why not another.
    """
    packed = [FIRST, SECOND]
    for kernel in candidates(width_of_heads(body), device.type):

        def found(kernel: Kernel = kernel) -> Tensor:
            return packing.packed_hidden(body, packed, device, kernel=kernel)

        problem = _difference(body, packed, found, device)
        if not problem:
            log.info("the rows of a group are packed behind one copy of their prompt: %s", kernel)
            return kernel
        log.warning("rows are not packed behind one copy of their prompt by %s: %s", kernel, problem)
    return None


def candidates(width: int, device: str) -> list[Kernel]:
    """The kernels that may compute rows behind a shared prompt, the fastest first. The log says why FlexAttention is
    none of them on CUDA.

    Args:
        width: Of a head.
        device: Type of the device.
    """
    if device != "cuda":
        return [Kernel.ROWS]
    if width < LEAST_WIDTH:
        log.warning(
            "rows behind a shared prompt are computed one by one, which is slower: FlexAttention needs heads of a "
            "width of at least %d, and this model's are %d wide",
            LEAST_WIDTH,
            width,
        )
        return [Kernel.ROWS]
    return [Kernel.FLEX, Kernel.ROWS]


def width_of_heads(body: Any) -> int:
    """Width of an attention head."""
    config = body.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _difference(
    body: nn.Module, packed: Sequence[PackedRows], compute: Callable[[], Tensor], device: torch.device
) -> str:
    """What is wrong with the states, or their gradient, of a packed sequence; empty if they are those of its rows.

    The difference must be of the size of rounding, and far below what one row that saw the other would make: in
    bfloat16 the first alone would not tell.
    """
    parts: list[Tensor] = []
    for prompt, rows in packed:
        separate = [_alone(body, [*prompt, *row], device) for row in rows]
        parts += [separate[0][: len(prompt)], *(states[len(prompt) :] for states in separate)]
    expected = torch.cat(parts)
    one_row = _alone(body, [token for prompt, rows in packed for part in (prompt, *rows) for token in part], device)
    influence = float((one_row - expected).detach().abs().max())
    try:
        states = compute()
        slope = _gradient(body, states)
    except (RuntimeError, TypeError, ValueError) as error:  # a family that makes something of the mask before
        return str(error).strip().partition("\n")[0] or type(error).__name__
    rounding = 8 * torch.finfo(expected.dtype).eps
    deviation = float((states - expected).detach().abs().max())
    if not deviation <= min(max(1e-4, rounding) * float(expected.detach().abs().max()), influence / 8):
        return f"states of packed rows differ by {deviation:g}"
    right = _gradient(body, expected)
    off = float((slope - right).norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny))
    return "" if off <= max(1e-3, 2 * rounding) else f"gradients of packed rows differ by {off:.1%}"


def _gradient(body: nn.Module, states: Tensor) -> Tensor:
    """Gradient of a weighted sum of states for the first trained weights, on which all layers act; empty where
    gradients are disabled.
    """
    trained = [weight for weight in body.parameters() if weight.requires_grad][:2] if states.requires_grad else []
    if not trained:
        return states.new_zeros(0)
    weights = torch.linspace(-1, 1, states.numel(), device=states.device, dtype=states.dtype).view_as(states)
    return torch.cat([slope.flatten() for slope in torch.autograd.grad((states * weights).sum(), trained)])


def _alone(body: nn.Module, row: Sequence[int], device: torch.device) -> Tensor:
    """Last hidden states of one row: shape (tokens, hidden size)."""
    output: Any = body(input_ids=torch.tensor([row], device=device), use_cache=False)
    return output.last_hidden_state[0]
