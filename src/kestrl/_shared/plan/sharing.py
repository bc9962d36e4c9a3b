"""Memory of an engine and the learner on one device. Pure."""

from __future__ import annotations

import math

from kestrl._shared.plan.engines import SPARE_SLOTS, engine_rank
from kestrl._shared.plan.memory import GIB, MARGIN, MemoryEstimate, MemoryPart
from kestrl._shared.plan.settings.inference import LEAST_MOVE_SECONDS
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.rules.job_rules import check
from kestrl.engines import EngineMemory
from kestrl.errors import UserInputError

ENGINE_PROGRAM = 3 * GIB
"""Context of the device, activations of a pass and graphs of an engine."""
UNUSED = GIB // 2
"""Bytes that neither may use, for what the estimates leave out."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
RESIDENT = (
    MemoryPart.ADAPTER,
    MemoryPart.ROUNDED,
    MemoryPart.OPTIMIZER,
    MemoryPart.COPIES,
    MemoryPart.PROGRAM,
)
"""What the learner keeps on the device between two updates, beside its base."""
PINNED = 2
"""Bound of the host memory in which a sleeping engine keeps its weights, over their bytes: it pins a copy of each piece
by itself, which torch rounds up to a power of two."""
SLOWEST_MOVE = GIB // 2
"""Bytes a second that an engine's weights move at least. The first sleep pins the memory of the copies meanwhile, some
GiB a second, and later ones go at the rate of the bus; a busy or divided host is slower."""
SOME_TARGETS = 4
"""Bound of an engine's adapter memory over that of the targets: engines reserve it for every layer that can have an
adapter."""


class SharedMemory:
    """How the learner and an engine divide one device, at the same time or in turns.

    Attributes:
        base_offload: Whether the learner's base is in host memory while the engine has the device.
        learner: Bytes of the learner with its margin.
        beside: Bytes of the learner with its margin while the engine computes.
        weights: Bytes of the engine's weights and adapter slots on the device.
        engine_host: Bytes of host memory in which the engine keeps those of all its devices while it sleeps.
        base_host: Bytes of host memory in which the learner keeps its base.
        host: Bytes of host memory that turns take, with activations that the learner offloads.
        rows_in_flight: Rows that the engine has at the same time at most.
        move_seconds: Longest time in which the engine's weights move between device and host.
    """

    def __init__(
        self,
        spec: JobSpec,
        estimate: MemoryEstimate,
        *,
        ranks: int,
        engine_rank: int,
        slots: int,
        base_offload: bool = False,
    ) -> None:
        parts, self.base_offload = estimate.parts, base_offload
        base = parts.get(MemoryPart.BASE, 0)
        self.learner = math.ceil(estimate.total * (1 + MARGIN))
        self._turns = spec.inference.sharing == "turns"
        resident = sum(parts.get(part, 0) for part in RESIDENT) + (0 if base_offload else base)
        self.beside = math.ceil(resident * (1 + MARGIN)) if self._turns else self.learner
        devices = spec.inference.accelerator.count
        adapter = parts.get(MemoryPart.ADAPTER, 0) * DTYPE_BYTES[spec.model.dtype] // DTYPE_BYTES["float32"]
        scale = 1 if spec.model.adapter.targets == "all-linear" else SOME_TARGETS
        slot = math.ceil(adapter * scale * engine_rank / spec.model.adapter.rank)
        self.weights = math.ceil((base * ranks + slots * slot) / devices)
        self._row = estimate.cached_token * spec.inference.context_length // devices
        self.rows_in_flight = rows_in_flight(spec)
        self.engine_host = PINNED * self.weights * devices if self._turns else 0
        self.base_host = base if base_offload else 0
        self.host = self.engine_host + self.base_host + estimate.host
        self.move_seconds = max(LEAST_MOVE_SECONDS, self.weights * devices / SLOWEST_MOVE)

    def fits(self, free: float) -> bool:
        """Whether a device with so many free bytes holds an engine with a cache for one row of the context length, and
        the learner beside what a sleeping engine keeps.
        """
        asleep = not self._turns or free >= self.learner + ENGINE_PROGRAM + UNUSED
        return asleep and self._cache(free) > self._row

    def holds_all_rows(self, free: float) -> bool:
        """Whether it fits with a cache for all rows in flight, each of the context length."""
        return self.fits(free) and self._cache(free) >= self._row * self.rows_in_flight

    def cached_rows(self, cache_bytes: int) -> int | None:
        """Rows in flight that a cache holds at the context length; None for a model whose cache is not known."""
        return min(self.rows_in_flight, cache_bytes // self._row) if self._row else None

    def engine(self, *, free: float, total: float) -> EngineMemory | None:
        """The engine's part of a device of `total` bytes of which `free` are free; None if they do not fit."""
        if not self.fits(free):
            return None
        part = int(free) - self.beside - UNUSED
        return EngineMemory(utilization=math.floor(part / total * 1000) / 1000, cache_bytes=self._cache(free))

    def _cache(self, free: float) -> int:
        return int(free) - self.beside - UNUSED - self.weights - ENGINE_PROGRAM

    def shortage(self, device: str, free: float, advice: str) -> UserInputError:
        """The error of a device that is too small for both."""
        engine = self.weights + self._row
        needed = max(self.beside + engine, self.learner) + ENGINE_PROGRAM + UNUSED
        away = ", with its base in host memory while the engine computes" if self.base_offload else ""
        return UserInputError(
            f"the learner and an engine share device {device}, which has {free / GIB:.1f} GiB free, and need more than "
            f"{needed / GIB:.1f}: learner {self.learner / GIB:.1f}{away}, engine "
            f"{(engine + ENGINE_PROGRAM) / GIB:.1f} with a cache for one row. {advice}, or offer one more device"
        )


def rows_in_flight(spec: JobSpec) -> int:
    """Rows that each engine of a job has at the same time at most: those of the steps that may be under way, as far as
    the workers take them, divided among the engines.
    """
    algorithm, rollout = spec.algorithm, spec.rollout
    rows = algorithm.group_size * algorithm.groups_per_step * (algorithm.max_staleness + 1)
    return math.ceil(min(rows, rollout.replicas * rollout.concurrency) / spec.inference.replicas.min)


def shared_memory(
    spec: JobSpec, estimate: MemoryEstimate, *, ranks: int, free: float | None, host_free: float
) -> SharedMemory:
    """The division of a device. In turns the learner's base leaves it between updates, which each turn pays with a
    copy, where the cache would hold less than the rows in flight and host memory has the place; and where both do not
    fit otherwise.

    Args:
        spec: The job's.
        estimate: Of the learner's memory.
        ranks: Processes that share the base.
        free: Free bytes of the device; None if they are not known, where the base stays.
        host_free: Free bytes of host memory.
    """

    def division(*, base_offload: bool) -> SharedMemory:
        return SharedMemory(
            spec,
            estimate,
            ranks=ranks,
            engine_rank=engine_rank(spec.inference.engine, spec.model.adapter.rank),
            slots=spec.inference.adapter_slots + SPARE_SLOTS,
            base_offload=base_offload,
        )

    staying = division(base_offload=False)
    if free is None or spec.inference.sharing == "split" or staying.holds_all_rows(free):
        return staying
    leaving = division(base_offload=True)
    return staying if staying.fits(free) and leaving.host > host_free else leaving


def turns_instead(spec: JobSpec, estimate: MemoryEstimate, *, ranks: int, free: float, host_free: float) -> str | None:
    """The fields with which a device that is too small for both at once holds them in turns; None if it does not, or
    the job cannot take turns.

    Args:
        spec: Of a job that splits the device.
        estimate: Of the learner's memory.
        ranks: Processes that share the base.
        free: Free bytes of the device.
        host_free: Free bytes of host memory.
    """
    in_turns = spec.model_copy(
        update={
            "inference": spec.inference.model_copy(update={"sharing": "turns"}),
            "algorithm": spec.algorithm.model_copy(update={"max_staleness": 0}),
        }
    )
    if check(in_turns):
        return None
    division = shared_memory(in_turns, estimate, ranks=ranks, free=free, host_free=host_free)
    if not division.fits(free) or division.host > host_free:
        return None
    lower = "" if spec.algorithm.max_staleness == 0 else ", with spec.algorithm.maxStaleness: 0, which it needs"
    return f"spec.inference.sharing: turns fits{lower}"
