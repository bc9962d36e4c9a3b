"""Linear layers that compute with copies of their adapter in bfloat16.

peft keeps the adapter of a bfloat16 base in float32 and casts to it, and back, in each call: the casts and the products
in float32 were 18 % of a step of a 1.7B model on a GPU. Here the optimiser, checkpoints and published files have the
float32 weights as before, and passes compute with copies that are rounded once for each change of them, as an engine
rounds what it loads. Gradients are those of the copies (mixed precision, Micikevicius et al. 2018), added to the
float32 weights in float32, so that updates below the resolution of bfloat16 add up.
"""
# torch and peft have loose types; values from them are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

log = logging.getLogger(__name__)


def rounds_adapter(dtype: str, device: str) -> bool:
    """Whether passes of a base compute with rounded copies of its adapter by default.

    On a CPU, where no step was measured to be faster, the adapter keeps the computation of peft.

    Args:
        dtype: Of the base's weights.
        device: torch device.
    """
    return dtype == "bfloat16" and device.partition(":")[0] != "cpu"


def round_adapter(network: nn.Module) -> None:
    """Has the layers of an adapter compute with rounded copies of it. Others than plain linear layers of bfloat16 keep
    peft's computation, and the log names them.
    """
    layers: list[Any] = [module for module in network.modules() if isinstance(module, LoraLayer)]
    exceptions: set[str] = set()
    for layer in layers:
        if _is_plain(layer):
            layer.__class__ = RoundedLinear
        else:
            exceptions.add(type(layer.get_base_layer()).__name__)
    rounded = sum(isinstance(layer, RoundedLinear) for layer in layers)
    log.info("%d of %d layers compute with their adapter in bfloat16", rounded, len(layers))
    if exceptions:
        log.warning(
            "%d layers (%s) compute with their adapter in float32, which is slower: they are no plain linear layers of "
            "bfloat16",
            len(layers) - rounded,
            ", ".join(sorted(exceptions)),
        )


def _is_plain(layer: Any) -> bool:
    base = layer.get_base_layer()
    return (
        type(layer) is Linear
        and type(base) is nn.Linear
        and base.weight.dtype == torch.bfloat16
        and len(layer.lora_A) == 1
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
    )


@dataclass(frozen=True, slots=True)
class RoundedCopies:
    """Copies in bfloat16 of the two matrices of a layer's adapter."""

    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    """torch's counts of changes in place of the sources, when they were copied."""
    low: Tensor
    """A, (rank, features)."""
    high: Tensor
    """The scaling times B, (outputs, rank)."""
    scaling: float

    def current(self, low: Tensor, high: Tensor) -> bool:
        """Whether the sources are these and unchanged."""
        same = self.sources[0] is low and self.sources[1] is high
        return same and self.versions == (low._version, high._version)


@torch.no_grad()
def rounded_copies(low: Tensor, high: Tensor, scaling: float) -> RoundedCopies:
    """Copies of A and B as they are now."""
    versions = low._version, high._version
    scaled = (high * scaling).to(torch.bfloat16)
    return RoundedCopies((low, high), versions, low.to(torch.bfloat16), scaled, scaling)


class RoundedLinear(Linear):
    """peft's linear layer, which computes with rounded copies of its adapter; the class of a layer is set to it."""

    copies: RoundedCopies | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs or x.dtype != torch.bfloat16:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        base: Any = self.get_base_layer()
        # In a graph nothing is looked at twice: `compiled_layers` asks for current copies before each call of a layer.
        copies = self.copies if torch.compiler.is_compiling() else self.current_copies()
        assert copies is not None, "a compiled layer is called with copies"
        (name,) = self.active_adapters
        low, high = self.lora_A[name].weight, self.lora_B[name].weight
        product: Tensor = _AdaptedProduct.apply(
            x, base.weight, base.bias, low, high, copies.low, copies.high, copies.scaling
        )
        return product

    def current_copies(self) -> RoundedCopies:
        """Copies of the adapter's weights as they are."""
        (name,) = self.active_adapters
        low: Any = self.lora_A[name].weight
        high: Any = self.lora_B[name].weight
        if self.copies is None or not self.copies.current(low, high):
            self.copies = rounded_copies(low, high, self.scaling[name])
        return self.copies


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + bias + x A^T (s B)^T with the rounded A and s B; gradients for x, A and B, the latter two in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor,  # noqa: ARG004 - its gradient is returned
        high: Tensor,  # noqa: ARG004
        low_copy: Tensor,
        high_copy: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low_rows = rows @ low_copy.T
        output = nn.functional.linear(rows, weight, bias).addmm_(low_rows, high_copy.T)
        ctx.save_for_backward(rows, low_rows, weight, low_copy, high_copy)
        ctx.scaling = scaling
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = slopes
        rows, low_rows, weight, low, high = ctx.saved_tensors
        of_output = slope.reshape(-1, slope.shape[-1])
        of_low_rows = of_output @ high
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_x = (of_output @ weight).addmm_(of_low_rows, low).view(*slope.shape[:-1], -1)
        of_low = _product_in_float32(of_low_rows.T, rows)
        of_high = _product_in_float32(of_output.T, low_rows)
        if ctx.scaling != 1.0:
            of_high.mul_(ctx.scaling)
        return of_x, None, None, of_low, of_high, None, None, None


def _product_in_float32(factor: Tensor, second_factor: Tensor) -> Tensor:
    """A product of bfloat16 matrices in float32: on CUDA the sum of it, elsewhere rounded before."""
    if factor.device.type == "cuda":
        return torch.mm(factor, second_factor, out_dtype=torch.float32)
    return torch.mm(factor, second_factor).float()
