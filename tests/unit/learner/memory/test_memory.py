"""The estimate of a step's peak memory against the resident memory of a process that makes the step."""
# transformers has loose types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportArgumentType=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.learner.memory.memory_process import measured_on_rank
from tests.unit.learner.ranks.forked_ranks import on_ranks
from tests.unit.learner.train.test_training import algorithm
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrl._shared.plan.components import TORCH_DEFAULTS
from kestrl._shared.plan.memory import GIB, GIVE_BACK, MARGIN, MemoryPart, MemorySettings
from kestrl._shared.plan.settings.learner import PolicySettings
from kestrl.errors import UserInputError
from kestrl_learner.memory.estimate import estimate, longest_group
from kestrl_learner.memory.live_bytes import LiveBytes

pytestmark = [pytest.mark.timeout(400), pytest.mark.share]

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def base(folder: Path, kind: str, *, layers: int, **shape: Any) -> str:
    """Folder of a random model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as quiet

    quiet.disable_progress_bar()
    given = SHAPE | {"num_hidden_layers": layers} | shape
    model: Any = Qwen3ForCausalLM(Qwen3Config(**given)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**given))
    model.save_pretrained(folder)
    return str(folder)


def config_of(folder: Path, *, layers: int) -> str:
    """Folder of a model's config.json without weights."""
    from transformers import LlamaConfig

    LlamaConfig(**SHAPE, num_hidden_layers=layers).save_pretrained(folder)
    return str(folder)


def asked(
    model: str, *, dtype: str = "float32", checkpointing: bool = False, layers: int | None = None, **changes: Any
) -> MemorySettings:
    policy = PolicySettings.model_validate(
        {
            "model": model,
            "dtype": dtype,
            "rank": 16,
            "alpha": 16.0,
            "targets": "all-linear",
            "seed": 1,
            "gradient_checkpointing": checkpointing,
            "checkpointed_layers": layers,
        }
    )
    given: dict[str, Any] = {"kind": "AgentRLJob", "prompt": 64, "completion": 192, "group_rows": 8, "groups": 1}
    return MemorySettings.model_validate(
        {"policy": policy, **given, "published": 0, "several_updates": False, **changes}
    )


CASES: dict[str, dict[str, Any]] = {
    "llama float32": {"kind": "llama", "dtype": "float32", "checkpointing": False},
    "llama bfloat16": {"kind": "llama", "dtype": "bfloat16", "checkpointing": False},
    "qwen3 checkpointed": {"kind": "qwen3", "dtype": "float32", "checkpointing": True, "vocab_size": 16_384},
    "qwen3 first layer checkpointed": {"kind": "qwen3", "checkpointing": True, "layers": 1, "vocab_size": 16_384},
    "all parameters": {"kind": "llama", "dtype": "bfloat16", "checkpointing": False, "parameters": "all"},
}
"""A packed pass has half the tokens of the others; the larger vocabulary keeps its peak far above working memory."""


def steps(folder: Path, kind: str, *, vocab_size: int = 8192, **given: Any) -> tuple[MemorySettings, MemorySettings]:
    """A small step, which loads libraries, and the step to measure."""
    small = base(folder / "small", kind, layers=1, hidden_size=32, vocab_size=512)
    step = base(folder / "model", kind, layers=3, vocab_size=vocab_size)
    return asked(small, prompt=4, completion=4, group_rows=2, **given), asked(step, **given)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[MemorySettings, int]]:
    """Each case with the bytes that its step takes in one process for all."""
    cases = {name: steps(tmp_path_factory.mktemp("models"), **given) for name, given in CASES.items()}
    lines = [
        {
            "warm_up": small.model_dump(mode="json"),
            "asked": step.model_dump(mode="json"),
            "algorithm": algorithm().model_dump(mode="json"),
        }
        for small, step in cases.values()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.learner.memory.memory_process"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=False,
        env={**TORCH_DEFAULTS, **os.environ, **GIVE_BACK},
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stderr
    peaks = map(int, done.stdout.split())
    return {name: (step, peak) for (name, (_, step)), peak in zip(cases.items(), peaks, strict=True)}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_token_of_an_engine_s_cache_is_counted(tmp_path: Path, dtype: str, size: int) -> None:
    answer = estimate(asked(config_of(tmp_path, layers=2), dtype=dtype))
    assert answer.cached_token == 2 * 2 * 2 * 64 * size, "keys and values of 2 layers with 2 heads of 64"


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_its_margin_of_the_measured_peak(
    name: str, measured: dict[str, tuple[MemorySettings, int]]
) -> None:
    step, peak = measured[name]
    found = estimate(step)
    tensors = found.total - found.parts[MemoryPart.PROGRAM]
    if name == "llama bfloat16" and " avx512_bf16 " in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"kernels for bfloat16 of this processor take buffers that are not estimated: {peak - tensors} B")
    assert tensors == pytest.approx(peak, rel=MARGIN)


def test_the_estimate_of_a_rank_is_within_its_margin(tmp_path: Path) -> None:
    """On two ranks over gloo, each with a pass of its own."""
    case = sharded_steps(tmp_path, "llama", dtype="float32", checkpointing=False)
    estimated = estimate(case[1])
    tensors = estimated.total - estimated.parts[MemoryPart.PROGRAM]
    assert estimated.parts[MemoryPart.GATHERED] > 0
    for peaks in on_ranks(2, measured_on_rank, [case], algorithm()):
        assert not isinstance(peaks, BaseException), peaks
        assert tensors == pytest.approx(peaks[0], rel=MARGIN)


def sharded_steps(folder: Path, kind: str, **given: Any) -> tuple[MemorySettings, MemorySettings]:
    """As `steps`, of a model with wide layers and short rows."""
    small = base(folder / "small", kind, layers=1, hidden_size=32, vocab_size=512)
    wide = base(folder / "wide", kind, layers=8, hidden_size=512, intermediate_size=2048, vocab_size=1024)
    shape: dict[str, Any] = {"group_rows": 2, "groups": 2, "ranks": 2}
    return (
        asked(small, prompt=4, completion=4, **shape, **given),
        asked(wide, prompt=32, completion=64, **shape, **given),
    )


def test_parts_of_the_estimate_have_the_sizes_of_their_tensors(tmp_path: Path) -> None:
    """Weights by their shapes; activations in proportion to the tokens of a pass, and to layers without
    checkpointing.
    """
    model = config_of(tmp_path / "two", layers=2)
    found = estimate(asked(model, group_rows=2))
    hidden, inner, heads = 256, 1024, 4 * 64 + 2 * 2 * 64
    layer = hidden * (heads + 4 * 64) + 3 * hidden * inner
    assert found.parts[MemoryPart.BASE] == pytest.approx(4 * (8192 * hidden + 2 * layer), rel=0.01)
    adapter = 2 * 16 * ((hidden + 256) * 2 + (hidden + 128) * 2 + 3 * (hidden + inner))
    assert found.parts[MemoryPart.ADAPTER] == 4 * adapter
    assert found.parts[MemoryPart.OPTIMIZER] == pytest.approx(2 * 4 * adapter, rel=0.01)
    twice = estimate(asked(model, group_rows=2, completion=2 * 192 + 64))
    assert twice.parts[MemoryPart.ACTIVATIONS] > 1.7 * found.parts[MemoryPart.ACTIVATIONS]
    checkpointed = estimate(asked(model, group_rows=2, checkpointing=True))
    assert checkpointed.parts.get(MemoryPart.ACTIVATIONS, 0) < found.parts[MemoryPart.ACTIVATIONS] / 2


def test_all_parameters_have_their_gradients_and_optimizer_state(tmp_path: Path) -> None:
    """16 bytes a parameter in float32, whatever passes compute in."""
    model = config_of(tmp_path, layers=2)
    single, half = (
        estimate(asked(model, groups=2, parameters="all", dtype=dtype)) for dtype in ("float32", "bfloat16")
    )
    frozen = estimate(asked(model)).parts[MemoryPart.BASE]
    for found in (single, half):
        assert found.parts[MemoryPart.BASE] == pytest.approx(frozen, rel=1e-3)
        assert found.parts[MemoryPart.OPTIMIZER] == pytest.approx(2 * frozen, rel=1e-3)
        assert 0 < found.parts[MemoryPart.GRADIENTS] <= 1.001 * frozen
        assert MemoryPart.ADAPTER not in found.parts
    assert half.parts[MemoryPart.ACTIVATIONS] < single.parts[MemoryPart.ACTIVATIONS]


def test_a_device_computes_with_copies_of_the_adapter_and_keeps_no_float32_activations(tmp_path: Path) -> None:
    here = asked(config_of(tmp_path, layers=2), dtype="bfloat16", group_rows=2)
    there = here.model_copy(update={"policy": here.policy.model_copy(update={"device": "cuda"})})
    on_cpu, on_device = estimate(here).parts, estimate(there).parts
    assert MemoryPart.ROUNDED not in on_cpu
    assert on_device[MemoryPart.ADAPTER] == on_cpu[MemoryPart.ADAPTER] == 2 * on_device[MemoryPart.ROUNDED]
    assert on_device[MemoryPart.ACTIVATIONS] < 0.7 * on_cpu[MemoryPart.ACTIVATIONS]


@pytest.mark.share(2)
def test_ranks_divide_the_layers_and_keep_the_rest_whole(tmp_path: Path) -> None:
    model = config_of(tmp_path, layers=8)
    parts = {count: estimate(asked(model, ranks=count)).parts for count in (1, 2, 4)}
    embeddings = 4 * 8192 * 256
    layers = parts[1][MemoryPart.BASE] - embeddings
    for count in (2, 4):
        assert parts[count][MemoryPart.BASE] - embeddings == pytest.approx(layers / count, rel=0.01)
        assert all(parts[count][part] == parts[1][part] for part in (MemoryPart.ADAPTER, MemoryPart.OPTIMIZER))


def test_a_rank_with_one_pass_has_no_gradient_before_it(tmp_path: Path) -> None:
    """Two groups are a pass each of two ranks, and both of one: 64 + 4 * 192 tokens are in one pass on a CPU."""
    model = config_of(tmp_path, layers=1)
    one, two = (estimate(asked(model, group_rows=4, groups=2, ranks=ranks)).parts for ranks in (1, 2))
    assert one[MemoryPart.GRADIENTS] == one[MemoryPart.ADAPTER]
    assert two.get(MemoryPart.GRADIENTS, 0) < one[MemoryPart.GRADIENTS]


def test_a_pass_has_as_many_rows_as_tokens_per_pass_allow(tmp_path: Path) -> None:
    model = config_of(tmp_path, layers=1)
    few = asked(model, group_rows=4)
    whole = estimate(few)
    few = few.model_copy(update={"policy": few.policy.model_copy(update={"tokens_per_pass": 64 + 2 * 192})})
    cut = estimate(few)
    assert (whole.rows, cut.rows) == (4, 2)
    assert cut.parts[MemoryPart.GRADIENTS] > 0, "the gradient of an earlier pass is there"
    assert cut.total < whole.total


def test_copies_of_the_adapter_count_where_they_are_kept(tmp_path: Path) -> None:
    step = asked(config_of(tmp_path, layers=1), published=3, several_updates=True)
    found = estimate(step)
    assert found.parts[MemoryPart.COPIES] == (3 + 3) * found.parts[MemoryPart.ADAPTER]
    on_device = step.model_copy(update={"policy": step.policy.model_copy(update={"device": "cuda"})})
    assert estimate(on_device).parts[MemoryPart.COPIES] == 3 * found.parts[MemoryPart.ADAPTER]


def test_rows_of_a_fine_tuning_step_have_their_own_prompts(tmp_path: Path) -> None:
    step = asked(config_of(tmp_path, layers=1), kind="SFTJob")
    group = longest_group(step)
    assert (len(group.prompt), len(group.rows[1].token_ids), sum(group.rows[1].mask)) == (0, 64 + 192, 192)
    assert estimate(step).rows == 4, "a packed pass on a CPU has at most 1,024 tokens"
    on_device = step.model_copy(update={"policy": step.policy.model_copy(update={"device": "cuda:0"})})
    assert estimate(on_device).rows == 8


def test_a_model_of_8b_is_estimated_from_its_config_alone(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    found = estimate(asked(str(tmp_path), dtype="bfloat16", checkpointing=True, prompt=1024, completion=15_360))
    assert found.parts[MemoryPart.BASE] / GIB == pytest.approx(2 * (2 * 151_936 * 4096 + 2 * 192.9e6) / GIB, rel=0.02)
    assert found.rows == 1


def test_offloaded_inputs_of_layers_are_counted_on_the_host(tmp_path: Path) -> None:
    step = asked(config_of(tmp_path, layers=6), checkpointing=True, kind="SFTJob")
    policy = step.policy.model_copy(update={"device": "cuda"})
    kept = estimate(step.model_copy(update={"policy": policy}))
    policy = policy.model_copy(update={"activation_offload": True})
    found = estimate(step.model_copy(update={"policy": policy}))
    inputs = 6 * (8 * 256 - 1) * 256 * 4
    assert kept.host == 0
    assert inputs <= found.host < 1.6 * inputs, "and those of the norm behind the layers"
    assert found.total < kept.total


def test_each_layer_that_is_not_checkpointed_keeps_its_activations(tmp_path: Path) -> None:
    model = config_of(tmp_path, layers=6)
    peaks = [estimate(asked(model, checkpointing=True, layers=count)).total for count in (1, 3, 6)]
    assert peaks[0] > peaks[1] > peaks[2]
    of_layer = (peaks[0] - peaks[2]) / 5
    assert peaks[1] == pytest.approx(peaks[0] - 2 * of_layer, abs=of_layer)
    everything = estimate(asked(model, checkpointing=True))
    assert (everything.total, everything.layers) == (peaks[2], 6)


def test_a_config_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserInputError, match=r"^spec.model.base: .* cannot be loaded"):
        estimate(asked(str(tmp_path)))


def test_views_count_once_and_released_tensors_no_longer() -> None:
    live = LiveBytes()
    with FakeTensorMode(), live:
        live.part = MemoryPart.ACTIVATIONS
        one = torch.empty(256)
        view = one.view(16, 16)[2:]
        del one
        assert live.now == {MemoryPart.ACTIVATIONS: 1024}, "the view keeps the storage"
        with live.counting(MemoryPart.LOGPROBS):
            other = view + 1
        live.recount(view, MemoryPart.GRADIENTS)
        del view
        assert live.now == {MemoryPart.LOGPROBS: 14 * 16 * 4}
        assert other.shape == (14, 16)
    assert live.peak == {MemoryPart.ACTIVATIONS: 1024, MemoryPart.LOGPROBS: 14 * 16 * 4}
