"""`kestrl plan --memory`: the learner's peak memory before a run, and whether a device holds it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import typer
from rich.console import Console
from rich.table import Table

from kestrl._app.local.check import fitted_job
from kestrl._app.local.memory import estimated
from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.plan.memory import (
    GIB,
    GIVE_BACK,
    MARGIN,
    MemoryEstimate,
    MemorySettings,
    changes,
    checkpointed,
    fewest_checkpointed,
    memory_settings,
)
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.load import parse_job, read_document, with_overrides
from kestrl._shared.spec.sft import SFTJob, parse_sft_job
from kestrl.data.locate import locate_model
from kestrl.errors import UserInputError

CPU_NOTE = (
    "On a CPU the process takes up to twice as much, as glibc keeps freed memory; with "
    + ", ".join(f"{name}={value}" for name, value in GIVE_BACK.items())
    + " in its environment it takes what is estimated, and a step takes longer."
)


def print_memory(
    manifest: Path,
    overrides: tuple[str, ...],
    *,
    row: str | None,
    device_memory: float | None,
    as_json: bool,
    console: Console,
) -> None:
    """Prints the estimate of a job; ends with exit code 2 if the device does not hold it.

    Raises:
        UserInputError: The manifest or the row is invalid, the model cannot be read, or the learner is not installed.
        typer.Exit: The device does not hold it.
    """
    base = manifest.resolve().parent
    job = _read(manifest, overrides)
    if isinstance(job, AgentRLJob):
        job = fitted_job(job, base)
    model = locate_model(job.spec.model.base, base=base)
    settings = memory_settings(job, model=model, row=None if row is None else _row(row))
    estimate = estimated(settings)
    fits = None if device_memory is None else estimate.fits(device_memory * GIB)
    layers = fewest_layers(settings, estimate, device_memory) if fits and device_memory else None
    if as_json:
        document = {**estimate.model_dump(mode="json"), "total": estimate.total, "ranks": settings.ranks, "fits": fits}
        if layers is not None:
            document["checkpointed_layers"] = layers
        typer.echo(json.dumps(document, indent=2))
    else:
        console.print(_table(settings, estimate))
        console.print(_pass_of(settings, estimate), soft_wrap=True, markup=False, highlight=False)
        if settings.ranks > 1:
            console.print(_ranks_of(settings, estimate), soft_wrap=True, markup=False, highlight=False)
        if estimate.host:
            per_rank = " on each rank" if settings.ranks > 1 else ""
            text = f"Offloaded activations take {estimate.host / GIB:.2f} GiB of host memory{per_rank}."
            console.print(text, highlight=False)
        if settings.policy.device == "cpu":
            console.print(CPU_NOTE, soft_wrap=True, markup=False, highlight=False)
        if device_memory is not None:
            lines = verdict(settings, estimate, device_memory)
            if layers is not None:
                lines.append(
                    f"spec.learner.checkpointedLayers: {layers} fits, too, and computes {estimate.layers - layers} of "
                    f"{estimate.layers} layers once"
                )
            for line in lines:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
    if fits is False:
        raise typer.Exit(EXIT_INPUT)


def fewest_layers(settings: MemorySettings, estimate: MemoryEstimate, device_memory: float) -> int | None:
    """The least number of checkpointed layers that fits a device of some GiB; None where all are needed, or the job
    does not checkpoint them or names their number.

    Raises:
        UserInputError: As `estimated`.
    """
    if not settings.policy.gradient_checkpointing or settings.policy.checkpointed_layers is not None:
        return None
    one_layer = estimated(checkpointed(settings, 1))
    layers = fewest_checkpointed(all_layers=estimate, one_layer=one_layer, device_bytes=device_memory * GIB)
    while layers < estimate.layers:
        if (one_layer if layers == 1 else estimated(checkpointed(settings, layers))).fits(device_memory * GIB):
            return layers
        layers += 1
    return None


def _read(manifest: Path, overrides: tuple[str, ...]) -> AgentRLJob | SFTJob:
    document = read_document(manifest, AgentRLJob.__name__)
    fields = cast("dict[object, object]", document) if isinstance(document, dict) else {}
    is_sft = fields.get("kind") == SFTJob.__name__
    return (parse_sft_job if is_sft else parse_job)(with_overrides(document, overrides))


def _row(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]*)\+([1-9][0-9]*)", text)
    if match is None:
        raise UserInputError(f"--row: {text!r} is not PROMPT+COMPLETION, both in tokens, such as 1024+3072")
    return int(match[1]), int(match[2])


def _table(settings: MemorySettings, estimate: MemoryEstimate) -> Table:
    table = Table("learner" if settings.ranks == 1 else f"each of {settings.ranks} ranks", "GiB")
    table.columns[1].justify = "right"
    for part, size in estimate.parts.items():
        table.add_row(part.value, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("peak", f"{estimate.total / GIB:.2f}")
    return table


def _pass_of(settings: MemorySettings, estimate: MemoryEstimate) -> str:
    policy = settings.policy
    checkpointing = "with" if policy.gradient_checkpointing else "without"
    layers = "" if policy.checkpointed_layers is None else f" of {policy.checkpointed_layers} layers"
    trained = f"rank {policy.rank}" if settings.parameters == "adapter" else "all parameters"
    rows = settings.group_rows * settings.groups
    return (
        f"The largest pass holds {estimate.rows} of a step's {rows} rows of {settings.prompt} + {settings.completion} "
        f"tokens; {policy.dtype}, {trained}, {checkpointing} gradient checkpointing{layers}, device {policy.device}."
    )


def _ranks_of(settings: MemorySettings, estimate: MemoryEstimate) -> str:
    """What the ranks share, and on a CPU the memory of all of them."""
    shared = (
        f"The layers of the base are divided among {settings.ranks} ranks, and the passes of a step are dealt to them; "
        "embeddings, head, adapter, gradients and optimizer state are whole on each."
    )
    if settings.policy.device != "cpu":
        return shared
    return f"{shared} On one machine they take {settings.ranks * estimate.total / GIB:.2f} GiB together."


def verdict(settings: MemorySettings, estimate: MemoryEstimate, device_memory: float) -> list[str]:
    """Whether the device of a rank, of some GiB, holds the estimate, and otherwise the fields to change."""
    required_gib = estimate.total * (1 + MARGIN) / GIB
    size = f"{required_gib:.2f} GiB with a margin of {MARGIN:.0%}, of {device_memory:g} GiB"
    if estimate.fits(device_memory * GIB):
        return [f"fits: {size}"]
    return [f"does not fit: {size}. What would lower it:", *(f"  {line}" for line in changes(settings, estimate))]
