"""Memory of an engine and the learner on one device, by arithmetic."""

from __future__ import annotations

import math

import pytest
from tests.unit.shared.plan.test_memory import estimate
from tests.unit.shared.plan.test_plan import job_with

from kestrl._shared.plan.memory import GIB
from kestrl._shared.plan.settings.inference import LEAST_MOVE_SECONDS
from kestrl._shared.plan.sharing import SharedMemory, rows_in_flight, shared_memory, turns_instead

HOST = 1000 * GIB


ONE_CARD = (
    "inference.replicas=1",
    "inference.accelerator.profile=nvidia",
    "learner.accelerator.profile=nvidia",
)


def test_an_engine_has_what_the_learner_leaves() -> None:
    spec = job_with("model.dtype=bfloat16").spec
    shared = SharedMemory(spec, estimate(base=2), ranks=1, engine_rank=8, slots=0)
    assert shared.weights == 2 * GIB
    least = shared.learner + shared.weights + 3 * GIB + GIB // 2
    assert shared.engine(free=least, total=10 * GIB) is None
    engine = shared.engine(free=least + GIB, total=10 * GIB)
    assert engine is not None
    assert engine.cache_bytes == GIB


def test_adapters_of_some_targets_may_be_reserved_for_every_layer() -> None:
    def weights(targets: str) -> int:
        spec = job_with(f"model.adapter.targets={targets}").spec
        return SharedMemory(spec, estimate(adapter=1), ranks=1, engine_rank=8, slots=2).weights

    assert weights("all-linear") == 2 * GIB
    assert weights("[q_proj]") == 8 * GIB


def test_in_turns_an_engine_has_what_the_learner_keeps_between_two_updates_leaves() -> None:
    def shared(sharing: str) -> SharedMemory:
        spec = job_with("model.dtype=bfloat16", f"inference.sharing={sharing}", *ONE_CARD).spec
        return SharedMemory(spec, estimate(base=2, activations=6, logprobs=2), ranks=1, engine_rank=8, slots=0)

    split, turns = shared("split"), shared("turns")
    assert split.engine(free=12 * GIB, total=16 * GIB) is None, "both would have to stay"
    engine = turns.engine(free=16 * GIB, total=16 * GIB)
    assert engine is not None
    assert turns.beside == math.ceil(2 * GIB * 1.1), "its base stays on the device"
    assert engine.cache_bytes == 16 * GIB - turns.beside - turns.weights - 3 * GIB - GIB // 2
    assert (split.engine_host, turns.engine_host) == (0, 4 * GIB), "a sleeping engine's weights, in powers of two"
    assert turns.engine(free=turns.learner + 3 * GIB, total=16 * GIB) is None, "a sleeping engine keeps its program"


def test_a_sleeping_engine_keeps_the_weights_of_all_its_devices_in_host_memory() -> None:
    spec = job_with("inference.sharing=turns", "inference.accelerator.count=2", *ONE_CARD).spec
    shared = SharedMemory(spec, estimate(base=4), ranks=1, engine_rank=8, slots=0)
    assert (shared.weights, shared.engine_host) == (2 * GIB, 8 * GIB)


def division(free: float, *overrides: str, **parts: int) -> SharedMemory:
    spec = job_with("model.dtype=bfloat16", *ONE_CARD, *overrides).spec
    return shared_memory(spec, estimate(**parts), ranks=1, free=free, host_free=HOST)


def test_the_base_leaves_the_device_only_where_sleep_alone_does_not_fit() -> None:
    parts = {"base": 10, "optimizer": 1, "activations": 5}
    turns = "inference.sharing=turns"
    enough = math.ceil(11 * GIB * 1.1) + (10 + 3) * GIB + GIB // 2
    staying, leaving = division(enough + 1, turns, **parts), division(enough, turns, **parts)
    assert (staying.base_offload, staying.base_host) == (False, 0)
    assert (leaving.base_offload, leaving.base_host) == (True, 10 * GIB)
    assert leaving.beside == math.ceil(1 * GIB * 1.1), "its optimiser stays"
    assert leaving.learner == staying.learner, "an update takes as much"
    engine = leaving.engine(free=enough, total=30 * GIB)
    assert engine is not None
    assert engine.cache_bytes == enough - leaving.beside - (10 + 3) * GIB - GIB // 2
    assert not division(enough, **parts).base_offload, "split keeps both"


def test_a_device_that_cannot_hold_the_learner_or_the_engine_alone_is_refused() -> None:
    turns = "inference.sharing=turns"
    learner = division(17 * GIB, turns, base=10, activations=5)
    assert learner.engine(free=17 * GIB, total=17 * GIB) is None, "an update takes 16.5, beside a sleeping engine's 3"
    engine = division(13 * GIB, turns, base=10)
    assert engine.engine(free=13 * GIB, total=13 * GIB) is None
    assert str(engine.shortage("0", 13 * GIB, "Use a smaller model")) == (
        "the learner and an engine share device 0, which has 13.0 GiB free, and need more than 14.5: learner 11.0, "
        "with its base in host memory while the engine computes, engine 13.0 with a cache for one row. Use a smaller "
        "model, or offer one more device"
    )


def test_a_cache_that_holds_no_row_is_none() -> None:
    context = job_with().spec.inference.context_length
    parts = estimate(base=10).model_copy(update={"cached_token": GIB // context})
    spec = job_with("model.dtype=bfloat16", "inference.sharing=turns", *ONE_CARD).spec
    free = math.ceil(10 * GIB * 1.1) + (10 + 3) * GIB + GIB // 2 + GIB // 2
    leaving = shared_memory(spec, parts, ranks=1, free=free, host_free=HOST)
    assert leaving.base_offload, "half a GiB beside the base is less than a row"
    assert leaving.engine(free=14 * GIB, total=14 * GIB) is None
    assert "need more than 14.5" in str(leaving.shortage("0", 14 * GIB, ""))


def test_an_engine_s_weights_have_time_to_move() -> None:
    assert division(80 * GIB, base=10).move_seconds == LEAST_MOVE_SECONDS
    assert division(80 * GIB, base=61).move_seconds == 122.0
    assert division(80 * GIB, "inference.accelerator.count=2", base=61).move_seconds == 122.0, "a host moves them all"


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (("rollout.replicas=1",), 64),
        (("rollout.replicas=2", "algorithm.groupsPerStep=4"), 32),
        (("rollout={replicas: 2, concurrency: 8}",), 16),
        (("rollout.replicas=2", "algorithm.maxStaleness=1", "rollout.concurrency=80"), 128),
        (("rollout.replicas=1", "inference.replicas=3"), 22),
    ],
)
def test_rows_of_an_engine_are_its_part_of_the_steps_as_far_as_workers_take_them(
    overrides: tuple[str, ...], rows: int
) -> None:
    assert rows_in_flight(job_with("algorithm.groupSize=8", *ONE_CARD, *overrides).spec) == rows


def cached(rows_of_cache: float, host: float, sharing: str = "turns") -> SharedMemory:
    """Division of a device that has some rows of cache with the base on it, by a job with 64 rows of a GiB each."""
    spec = job_with("model.dtype=bfloat16", "rollout.replicas=1", f"inference.sharing={sharing}", *ONE_CARD).spec
    of_row = estimate(base=30, activations=2).model_copy(update={"cached_token": GIB // spec.inference.context_length})
    free = math.ceil(30 * GIB * 1.1) + (30 + 3) * GIB + GIB // 2 + rows_of_cache * GIB
    return shared_memory(spec, of_row, ranks=1, free=free, host_free=host * GIB)


def test_the_base_leaves_where_the_cache_would_not_hold_the_rows_in_flight() -> None:
    assert not cached(64, host=1000).base_offload
    leaving = cached(63.9, host=1000)
    assert leaving.base_offload
    part = leaving.engine(free=131 * GIB, total=141 * GIB)
    assert part is not None
    assert leaving.cached_rows(part.cache_bytes) == 64, "more is of no use"
    assert leaving.host == (60 + 30) * GIB
    assert not cached(3, host=1000, sharing="split").base_offload


def test_the_base_stays_where_the_host_has_no_place_and_both_fit() -> None:
    assert cached(3, host=90).base_offload
    assert not cached(3, host=89).base_offload, "a smaller cache is no reason to refuse a job"
    assert cached(0.5, host=89).base_offload, "without a row of cache it has to leave: the host's memory is the refusal"


def test_turns_are_named_only_where_they_fit() -> None:
    def advice(free: float, *overrides: str, host: float = HOST) -> str | None:
        spec = job_with("model.dtype=bfloat16", *ONE_CARD, *overrides).spec
        parts = estimate(base=10, optimizer=1, activations=5)
        return turns_instead(spec, parts, ranks=1, free=free * GIB, host_free=host)

    assert advice(25.7) == "spec.inference.sharing: turns fits"
    assert advice(21.2) == "spec.inference.sharing: turns fits", "with its base in host memory"
    assert advice(21) is None, "an update takes 17.6, beside a sleeping engine's 3 and what is unused"
    assert advice(25.7, host=19 * GIB) is None
    stale = "algorithm.maxStaleness=1"
    assert advice(25.7, stale) == (
        "spec.inference.sharing: turns fits, with spec.algorithm.maxStaleness: 0, which it needs"
    )
    assert advice(25.7, stale, "schedule.staleGroups=continue") is None
    for other in ("inference.replicas=2", "learner.accelerator.count=2", "inference.engine=sglang"):
        assert advice(25.7, other) is None
