"""What the estimate of the learner's memory is asked, and what it advises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.shared.plan.test_plan import job_with

from kestrl._shared.plan.memory import (
    GIB,
    MemoryEstimate,
    MemoryPart,
    MemorySettings,
    changes,
    fewest_checkpointed,
    memory_settings,
)
from kestrl._shared.plan.settings.inference import LEAST_MOVE_SECONDS
from kestrl._shared.plan.sharing import SharedMemory, shared_memory
from kestrl._shared.spec.sft import parse_sft_job


def settings_of(*overrides: str, row: tuple[int, int] | None = None) -> MemorySettings:
    return memory_settings(job_with(*overrides), model="/models/tiny", row=row)


def sft_settings(**training: Any) -> MemorySettings:
    manifest = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": "/models/tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "training": {"maxTokens": 100, **training},
        },
    }
    return memory_settings(parse_sft_job(manifest), model="/models/tiny", row=None)


def estimate(rows: int = 1, **parts: int) -> MemoryEstimate:
    return MemoryEstimate(parts={MemoryPart[name.upper()]: size * GIB for name, size in parts.items()}, rows=rows)


def test_the_longest_row_is_the_whole_context() -> None:
    longest = settings_of("inference.contextLength=1000", "agent.maxTokens=300")
    assert (longest.prompt, longest.completion) == (700, 300)
    given = settings_of("inference.contextLength=1000", "agent.maxTokens=300", row=(5, 7))
    assert (given.prompt, given.completion) == (5, 7)
    several_rows = settings_of("inference.contextLength=1000", "agent={loop: compacting_agent, maxTokens: 5000}")
    assert (several_rows.prompt, several_rows.completion) == (1, 999)


@pytest.mark.parametrize(
    ("overrides", "published", "several_updates", "ranks"),
    [
        ((), 0, False, 1),
        (("algorithm.maxStaleness=2", "inference.adapterSlots=4"), 3, False, 1),
        (("algorithm.miniBatches=2",), 0, True, 1),
        (("algorithm.miniBatchEpochs=2",), 0, True, 1),
        (("learner={replicas: 2, accelerator: {count: 3}}",), 0, False, 6),
    ],
)
def test_versions_updates_and_ranks_take_memory(
    overrides: tuple[str, ...], published: int, several_updates: bool, ranks: int
) -> None:
    settings = settings_of(*overrides)
    assert (settings.published, settings.several_updates, settings.ranks) == (published, several_updates, ranks)


def test_a_device_holds_the_estimate_and_a_margin() -> None:
    assert estimate(base=10).fits(11.001 * GIB)
    assert estimate(base=0).fits(0)
    assert not estimate(base=10).fits(10.9 * GIB)


@pytest.mark.parametrize(
    ("settings", "peak", "advice"),
    [
        (settings_of(), estimate(base=9), ["spec.model.dtype is float32: bfloat16 halves the base weights (9.00 GiB)"]),
        (
            settings_of("model.dtype=bfloat16"),
            estimate(base=9),
            ["spec.model.base: use a smaller model, or more ranks with spec.learner.accelerator.count (9.00 GiB)"],
        ),
        (sft_settings(parameters="all"), estimate(base=9), ["spec.model.base: use a smaller model (9.00 GiB)"]),
        (
            sft_settings(parameters="all"),
            estimate(optimizer=9),
            ["spec.training.parameters is all: adapter trains few parameters (9.00 GiB)"],
        ),
        (
            settings_of(),
            estimate(optimizer=2, copies=7),
            [
                "spec.model.adapter.rank is 8 and its targets are all-linear: lower the rank or name fewer targets "
                "(9.00 GiB)"
            ],
        ),
        (
            settings_of(),
            estimate(activations=8, logprobs=1),
            ["spec.learner.gradientCheckpointing is false: true keeps the inputs of layers only (9.00 GiB)"],
        ),
        (
            settings_of("learner.gradientCheckpointing=true"),
            estimate(rows=2, activations=9),
            ["spec.learner.tokensPerPass is 16384 (2 rows in a pass): lower it (9.00 GiB)"],
        ),
        (
            settings_of("learner.gradientCheckpointing=true", row=(5, 7)),
            estimate(rows=1, activations=9),
            [
                "spec.inference.contextLength and spec.agent.maxTokens: a pass holds one row of 12 tokens already; "
                "shorten it (9.00 GiB)"
            ],
        ),
    ],
)
def test_what_lowers_a_peak(settings: MemorySettings, peak: MemoryEstimate, advice: list[str]) -> None:
    assert changes(settings, peak) == advice


def peak(total: float, layers: int) -> MemoryEstimate:
    return MemoryEstimate(parts={MemoryPart.ACTIVATIONS: int(total * GIB)}, rows=1, layers=layers)


@pytest.mark.parametrize(("device", "layers"), [(200, 1), (111, 1), (98, 4), (54, 12), (22.1, 17), (5, 17)])
def test_the_least_number_of_layers_whose_peak_fits(device: float, layers: int) -> None:
    """100 GiB with the first layer checkpointed and 5 less for each other one, and the margin of a tenth."""
    fewest = fewest_checkpointed(all_layers=peak(20, 17), one_layer=peak(100, 17), device_bytes=device * GIB)
    assert fewest == layers


def test_the_largest_part_comes_first_and_small_ones_are_not_worth_it() -> None:
    advice = changes(settings_of(), estimate(base=5, optimizer=90, activations=4, program=1))
    assert [line.partition(" is ")[0] for line in advice] == ["spec.model.adapter.rank", "spec.model.dtype"]


def test_one_row_of_fine_tuning_is_shortened_by_its_own_field() -> None:
    settings = sft_settings()
    settings = settings.model_copy(
        update={"policy": settings.policy.model_copy(update={"gradient_checkpointing": True})}
    )
    (advice,) = changes(settings, estimate(activations=9))
    assert advice.startswith("spec.training.maxTokens: a pass holds one row of 100 tokens already")


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
    return shared_memory(spec, estimate(**parts), ranks=1, free=free)


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
    leaving = shared_memory(spec, parts, ranks=1, free=free)
    assert leaving.base_offload, "half a GiB beside the base is less than a row"
    assert leaving.engine(free=14 * GIB, total=14 * GIB) is None
    assert "need more than 14.5" in str(leaving.shortage("0", 14 * GIB, ""))


def test_an_engine_s_weights_have_time_to_move() -> None:
    assert division(80 * GIB, base=10).move_seconds == LEAST_MOVE_SECONDS
    assert division(80 * GIB, base=61).move_seconds == 122.0
    assert division(80 * GIB, "inference.accelerator.count=2", base=61).move_seconds == 122.0, "a host moves them all"
