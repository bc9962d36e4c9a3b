"""The first of several ranks without the others, for the memory estimate: layers are sharded and gathered as in a
step, on tensors without storage.
"""
# torch.distributed has partial annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

# It is public only as a parameter of `FSDPModule.set_custom_all_gather`.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.testing._internal.distributed.fake_pg import FakeStore

from kestrl._shared.plan.memory import MemoryPart
from kestrl_learner.memory.live_bytes import LiveBytes


@contextmanager
def fake_mesh(count: int) -> Generator[DeviceMesh]:
    """The mesh of a number of ranks, of which this process is the first and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


class CountedGather(AllGather):
    """Allocates what a gathered layer needs, and communicates nothing.

    Args:
        live: Counts it.
        over_gloo: Whether gloo gathers, which receives into a tensor of its own.
    """

    def __init__(self, live: LiveBytes, *, over_gloo: bool) -> None:
        self._live, self._over_gloo = live, over_gloo

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._live.counting(MemoryPart.GATHERED):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,  # noqa: ARG002 - part of the output already
        group: dist.ProcessGroup,  # noqa: ARG002 - nothing is sent
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        if self._over_gloo:
            with self._live.counting(MemoryPart.GATHERED):
                torch.empty_like(output_tensor)


def count_gathers(body: nn.Module, gather: CountedGather) -> None:
    """Has the sharded layers of a model gathered by `gather`."""
    for module in body.modules():
        if isinstance(module, FSDPModule) and module is not body:
            module.set_custom_all_gather(gather)
