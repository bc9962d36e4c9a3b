"""The tables of docs/gpus.md and docs/scaling-the-learner.md: the learner's memory, and what an engine has beside it.

They are written into the pages, by the plan's arithmetic from the estimates of docs/measured/memory_estimates.jsonl.
`--estimate` makes these anew: the learner's own estimate for each model and row, which takes a minute each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.random_models import shape

from kestrl._shared.plan.memory import GIB, MemoryEstimate, MemoryPart, memory_settings
from kestrl._shared.plan.sharing import SharedMemory, shared_memory
from kestrl._shared.spec import AgentRLJob, parse_job

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DOCS = Path(__file__).parents[1] / "docs"
ESTIMATES = DOCS / "measured" / "memory_estimates.jsonl"
FREE = 0.98
"""Share of a device that is free before anything starts."""
SPLIT_DEVICES = (24, 48, 80, 141)
TURNS_DEVICES = (24, 32, 48, 80, 96, 141)
"""GiB."""
TOO_SMALL = "too small"
QWEN2: dict[str, dict[str, int]] = {
    "0.5B": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "keys": 2},
    "1.5B": {"hidden": 1536, "inner": 8960, "layers": 28, "heads": 12, "keys": 2},
}
"""Sizes of Qwen2.5 by the name of the published model; the larger ones of `MODELS` are those of Qwen3."""
MODELS = ("0.5B", "1.5B", "8B", "14B", "32B")
ROWS = (4096, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Step:
    """One step whose memory is estimated."""

    model: str
    row: int = 4096
    """Tokens of each row, of which the first quarter is the prompt."""
    checkpointing: bool = True


WITHOUT_CHECKPOINTING = Step(model="8B", checkpointing=False)
STEPS = (
    *(Step(model=model) for model in MODELS),
    *(Step(model=model, row=row) for row in ROWS[1:] for model in MODELS),
    WITHOUT_CHECKPOINTING,
)


def job(step: Step, sharing: str = "split") -> AgentRLJob:
    """A job with such steps, of one engine and one rank on NVIDIA devices."""
    spec: dict[str, Any] = {
        "model": {"base": "/models/base", "dtype": "bfloat16", "adapter": {"rank": 16, "targets": "all-linear"}},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "format"}],
        "agent": {"maxTokens": step.row - step.row // 4},
        "algorithm": {"groupSize": 8},
        "inference": {
            "replicas": 1,
            "accelerator": {"profile": "nvidia"},
            "contextLength": step.row,
            "sharing": sharing,
        },
        "learner": {
            "accelerator": {"profile": "nvidia"},
            "gradientCheckpointing": step.checkpointing,
        },
    }
    metadata = {"name": "memory"}
    return parse_job({"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": metadata, "spec": spec})


def config(model: str) -> PretrainedConfig:
    """The config of a model of `MODELS`."""
    from transformers import Qwen2Config

    if model not in QWEN2:
        return shape(model)
    size = QWEN2[model]
    return Qwen2Config(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["keys"],
        vocab_size=151_936,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        dtype="bfloat16",
    )


def estimated(step: Step) -> MemoryEstimate:
    """The learner's estimate, from the model's config alone."""
    from kestrl_learner.memory.estimate import estimate

    with tempfile.TemporaryDirectory() as folder:
        config(step.model).save_pretrained(folder)
        return estimate(memory_settings(job(step), model=folder, row=None))


def kept_estimates() -> dict[Step, MemoryEstimate]:
    """The estimates of docs/measured."""
    lines = [json.loads(line) for line in ESTIMATES.read_text().splitlines()]
    estimates = [MemoryEstimate.model_validate(line.pop("estimate")) for line in lines]
    return {Step(**line): estimate for line, estimate in zip(lines, estimates, strict=True)}


def division(step: Step, estimate: MemoryEstimate, *, device: float, sharing: str) -> SharedMemory:
    """How a device of some GiB is divided, beside more host memory than is needed."""
    return shared_memory(job(step, sharing).spec, estimate, ranks=1, free=FREE * device * GIB, host_free=float("inf"))


def cache(step: Step, estimate: MemoryEstimate, *, device: float, sharing: str) -> str:
    """GiB of the KV cache on such a device, with an asterisk where the learner's base leaves it."""
    divided = division(step, estimate, device=device, sharing=sharing)
    part = divided.engine(free=FREE * device * GIB, total=device * GIB)
    if part is None:
        return TOO_SMALL
    return f"{int(part.cache_bytes / GIB)}{' *' * divided.base_offload}"


def host_memory(step: Step, estimate: MemoryEstimate) -> str:
    """GiB of host memory: of a sleeping engine, and of the learner's base on the devices that it leaves."""
    divided = [division(step, estimate, device=device, sharing="turns") for device in TURNS_DEVICES]
    fitting = [one for one, device in zip(divided, TURNS_DEVICES, strict=True) if one.fits(FREE * device * GIB)]
    bases = {one.base_host for one in fitting if one.base_offload}
    return ", and ".join([f"{fitting[0].engine_host / GIB:.0f}", *(f"{base / GIB:.0f} *" for base in bases)])


def split_table(estimates: Mapping[Step, MemoryEstimate]) -> list[str]:
    """KV cache of an engine beside the learner."""
    cells = [
        [step.model, *(cache(step, estimates[step], device=device, sharing="split") for device in SPLIT_DEVICES)]
        for step in map(Step, MODELS)
    ]
    return table(["model", *(f"{device} GiB" for device in SPLIT_DEVICES)], cells)


def turns_table(estimates: Mapping[Step, MemoryEstimate]) -> list[str]:
    """KV cache of an engine that has the device in turns with the learner."""
    cells = [
        [
            step.model,
            *(cache(step, estimates[step], device=device, sharing="turns") for device in TURNS_DEVICES),
            host_memory(step, estimates[step]),
        ]
        for step in map(Step, MODELS)
    ]
    return table(["model", *(f"{device} GiB" for device in TURNS_DEVICES), "host memory"], cells)


def learner_table(estimates: Mapping[Step, MemoryEstimate]) -> list[str]:
    """The learner's peak."""
    trained = (MemoryPart.ADAPTER, MemoryPart.ROUNDED, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER)
    cells: list[list[str]] = []
    for model in MODELS:
        parts = estimates[Step(model=model)].parts
        sizes = [parts[MemoryPart.BASE], sum(parts[part] for part in trained)]
        sizes += [estimates[Step(model=model, row=row)].total for row in ROWS]
        cells.append([model, *(f"{size / GIB:.1f}" for size in sizes)])
    columns = [
        "model",
        "base weights",
        "adapter, its copy, gradients, optimizer state",
        "peak, rows of 4k",
        "16k",
        "32k",
    ]
    return table(columns, cells)


def table(columns: list[str], cells: list[list[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    first, *others = [f"| {' | '.join(row)} |" for row in (columns, *cells)]
    return [first, "|" + "---|" * len(columns), *others]


def with_table(page: str, lines: list[str]) -> str:
    """A page with the table that begins with the same line replaced."""
    before, _, after = page.partition(f"\n{lines[0]}\n")
    assert after, f"the page has no table {lines[0]}"
    rest = after.splitlines()
    end = next(number for number, line in enumerate(rest) if not line.startswith("|"))
    return "\n".join([before, *lines, *rest[end:], ""])


def pages() -> dict[Path, str]:
    """The pages with their tables as the kept estimates have them."""
    estimates = kept_estimates()
    gpus, scaling = DOCS / "gpus.md", DOCS / "scaling-the-learner.md"
    return {
        gpus: with_table(with_table(gpus.read_text(), split_table(estimates)), turns_table(estimates)),
        scaling: with_table(scaling.read_text(), learner_table(estimates)),
    }


def main() -> None:
    """Writes the tables, and with `--estimate` the estimates before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimate", action="store_true", help="estimate anew: a minute for each of 16 steps")
    if parser.parse_args().estimate:
        lines = [{**asdict(step), "estimate": estimated(step).model_dump(mode="json")} for step in STEPS]
        ESTIMATES.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
