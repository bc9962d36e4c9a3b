"""Memory of an engine and the learner on one device. Pure."""

from __future__ import annotations

import math

from kestrl._shared.plan.memory import GIB, MARGIN, MemoryEstimate, MemoryPart
from kestrl._shared.spec.job import JobSpec
from kestrl.engines import EngineMemory
from kestrl.errors import UserInputError

ENGINE_PROGRAM = 3 * GIB
"""Context of the device, activations of a pass and graphs of an engine."""
UNUSED = GIB // 2
"""Bytes that neither may use, for what the estimates leave out."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SOME_TARGETS = 4
"""Bound of an engine's adapter memory over that of the targets: engines reserve it for every layer that can have an
adapter."""


class SharedMemory:
    """How the learner and an engine divide one device.

    Attributes:
        learner: Bytes of the learner with its margin.
        weights: Bytes of the engine's weights and adapter slots on the device.
    """

    def __init__(self, spec: JobSpec, estimate: MemoryEstimate, *, ranks: int, engine_rank: int, slots: int) -> None:
        parts = estimate.parts
        self.learner = math.ceil(estimate.total * (1 + MARGIN))
        devices = spec.inference.accelerator.count
        adapter = parts.get(MemoryPart.ADAPTER, 0) * DTYPE_BYTES[spec.model.dtype] // DTYPE_BYTES["float32"]
        scale = 1 if spec.model.adapter.targets == "all-linear" else SOME_TARGETS
        slot = math.ceil(adapter * scale * engine_rank / spec.model.adapter.rank)
        self.weights = math.ceil((parts.get(MemoryPart.BASE, 0) * ranks + slots * slot) / devices)

    def engine(self, *, free: float, total: float) -> EngineMemory | None:
        """The engine's part of a device of `total` bytes of which `free` are free; None if nothing is left for its
        cache.
        """
        part = int(free) - self.learner - UNUSED
        cache = part - self.weights - ENGINE_PROGRAM
        if cache <= 0:
            return None
        return EngineMemory(utilization=math.floor(part / total * 1000) / 1000, cache_bytes=cache)

    def shortage(self, device: str, free: float, advice: str) -> UserInputError:
        """The error of a device that is too small for both."""
        needed = self.learner + self.weights + ENGINE_PROGRAM + UNUSED
        return UserInputError(
            f"the learner and an engine share device {device}, which has {free / GIB:.1f} GiB free, and need more than "
            f"{needed / GIB:.1f}: learner {self.learner / GIB:.1f}, engine {(self.weights + ENGINE_PROGRAM) / GIB:.1f} "
            f"without a cache. {advice}, or offer one more device"
        )
