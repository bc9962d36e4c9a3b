"""What the estimate of the learner's memory is asked, and what it advises."""

from __future__ import annotations

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
