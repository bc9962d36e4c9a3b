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
RESIDENT = (MemoryPart.BASE, MemoryPart.ADAPTER, MemoryPart.OPTIMIZER, MemoryPart.COPIES, MemoryPart.PROGRAM)
"""What the learner keeps on the device between two updates."""
SOME_TARGETS = 4
"""Bound of an engine's adapter memory over that of the targets: engines reserve it for every layer that can have an
adapter."""


class SharedMemory:
    """How the learner and an engine divide one device, at the same time or in turns.

    Attributes:
        learner: Bytes of the learner with its margin.
        beside: Bytes of the learner with its margin while the engine computes. In turns its base stays on the device.
        weights: Bytes of the engine's weights and adapter slots on the device.
        host: Bytes of host memory in which the engine keeps those of all its devices while it sleeps.
    """

    def __init__(self, spec: JobSpec, estimate: MemoryEstimate, *, ranks: int, engine_rank: int, slots: int) -> None:
        parts = estimate.parts
        self.learner = math.ceil(estimate.total * (1 + MARGIN))
        self._turns = spec.inference.sharing == "turns"
        resident = sum(parts.get(part, 0) for part in RESIDENT)
        self.beside = math.ceil(resident * (1 + MARGIN)) if self._turns else self.learner
        devices = spec.inference.accelerator.count
        adapter = parts.get(MemoryPart.ADAPTER, 0) * DTYPE_BYTES[spec.model.dtype] // DTYPE_BYTES["float32"]
        scale = 1 if spec.model.adapter.targets == "all-linear" else SOME_TARGETS
        slot = math.ceil(adapter * scale * engine_rank / spec.model.adapter.rank)
        self.weights = math.ceil((parts.get(MemoryPart.BASE, 0) * ranks + slots * slot) / devices)
        self.host = self.weights * devices if self._turns else 0

    def engine(self, *, free: float, total: float) -> EngineMemory | None:
        """The engine's part of a device of `total` bytes of which `free` are free; None if nothing is left for its
        cache, or if the learner does not fit beside what a sleeping engine keeps.
        """
        part = int(free) - self.beside - UNUSED
        cache = part - self.weights - ENGINE_PROGRAM
        if cache <= 0 or (self._turns and free < self.learner + ENGINE_PROGRAM + UNUSED):
            return None
        return EngineMemory(utilization=math.floor(part / total * 1000) / 1000, cache_bytes=cache)

    def shortage(self, device: str, free: float, advice: str) -> UserInputError:
        """The error of a device that is too small for both."""
        needed = max(self.beside + self.weights, self.learner) + ENGINE_PROGRAM + UNUSED
        return UserInputError(
            f"the learner and an engine share device {device}, which has {free / GIB:.1f} GiB free, and need more than "
            f"{needed / GIB:.1f}: learner {self.learner / GIB:.1f}, engine {(self.weights + ENGINE_PROGRAM) / GIB:.1f} "
            f"without a cache. {advice}, or offer one more device"
        )
