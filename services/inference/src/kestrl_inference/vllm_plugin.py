"""What vLLM loads into each of its processes (`vllm.general_plugins`): a record of failed starts, and on a CPU `lora_cpu` for adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from kestrl import engine_failure
from kestrl_inference.lora_cpu import Group, add_embedding, add_lora, grouped

if TYPE_CHECKING:
    import torch


class GroupedPunica(PunicaWrapperCPU):
    """vLLM's own, but for how adapters are multiplied, and for layers that no adapter has a part for: those stay as they are.

    vLLM wraps the embedding and the head of every model, and multiplies the zeros that lie there as if they were an adapter's: for the head
    once for every token of the vocabulary and every row.
    """

    _groups: tuple[Group, ...] = ()

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
        del add_inputs  # vLLM always says so
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
        """An adapter of the head goes vLLM's way, which ends the engine when a prompt's log-probs are asked for beside another request:
        nothing says whose rows they are. A job cannot ask for one (`spec.rules`).
        """
        if lora_a_stacked.any():
            inherited: Any = super()
            inherited.add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)


def wrapper() -> str:
    """What vLLM's platform is asked for: the class's name, which its processes look up."""
    return f"{GroupedPunica.__module__}.{GroupedPunica.__qualname__}"


def register() -> None:
    """Records what keeps the process from starting; on a CPU, has adapters multiplied our way."""
    engine_failure.install()
    if current_platform.is_cpu():
        platform: Any = type(current_platform)
        platform.get_punica_wrapper = staticmethod(wrapper)
