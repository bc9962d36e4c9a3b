"""vLLM's LoRA on a CPU with the multiplications of `lora_cpu`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kestrl_inference.inside.lora_cpu import AdapterRows, add_embedding, add_lora, grouped

if TYPE_CHECKING:
    import torch

WRAPPER: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu").PunicaWrapperCPU


class GroupedPunica(WRAPPER):
    """vLLM's wrapper with faster multiplication of adapters. Layers without a part in any adapter are unchanged.

    vLLM wraps the embedding and the head of every model and multiplies their zeros as if they belonged to an adapter;
    for the head, once per token of the vocabulary and row.
    """

    _groups: tuple[AdapterRows, ...] = ()

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        inherited: Any = super()
        inherited.update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        self._groups = grouped(mapping.index_mapping, slots)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        add_lora(y, x, self._groups, lora_a_stacked, lora_b_stacked, output_slices, scale)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        del add_inputs  # vLLM always sets it
        if x.any():
            add_embedding(y, x, self._groups, lora_b_stacked)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Adapters of the head use vLLM's implementation, which crashes if prompt log-probs are requested beside
        another request, since the rows are not attributed to requests. `spec.rules` refuses such adapters.
        """
        if lora_a_stacked.any():
            inherited: Any = super()
            inherited.add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)


def wrapper() -> str:
    """Class name that vLLM's platform returns, for import in its processes."""
    return f"{GroupedPunica.__module__}.{GroupedPunica.__qualname__}"
