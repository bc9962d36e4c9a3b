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
from kestrl._shared.plan.memory import GIB, GIVE_BACK, MARGIN, MemoryEstimate, MemorySettings, changes, memory_settings
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
    asked = memory_settings(job, model=model, row=None if row is None else _row(row))
    found = estimated(asked)
    fits = None if device_memory is None else found.fits(device_memory * GIB)
    if as_json:
        document = {**found.model_dump(mode="json"), "total": found.total, "ranks": asked.ranks, "fits": fits}
        typer.echo(json.dumps(document, indent=2))
    else:
        console.print(_table(asked, found))
        console.print(_pass_of(asked, found), soft_wrap=True, markup=False, highlight=False)
        if asked.ranks > 1:
            console.print(_ranks_of(asked, found), soft_wrap=True, markup=False, highlight=False)
        if found.host:
            each = " on each rank" if asked.ranks > 1 else ""
            text = f"Offloaded activations take {found.host / GIB:.2f} GiB of host memory{each}."
            console.print(text, highlight=False)
        if asked.policy.device == "cpu":
            console.print(CPU_NOTE, soft_wrap=True, markup=False, highlight=False)
        if device_memory is not None:
            for line in verdict(asked, found, device_memory):
                console.print(line, soft_wrap=True, markup=False, highlight=False)
    if fits is False:
        raise typer.Exit(EXIT_INPUT)


def _read(manifest: Path, overrides: tuple[str, ...]) -> AgentRLJob | SFTJob:
    document = read_document(manifest, AgentRLJob.__name__)
    fields = cast("dict[object, object]", document) if isinstance(document, dict) else {}
    is_sft = fields.get("kind") == SFTJob.__name__
    return (parse_sft_job if is_sft else parse_job)(with_overrides(document, overrides))


def _row(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9][0-9]*)\+([1-9][0-9]*)", text)
    if found is None:
        raise UserInputError(f"--row: {text!r} is not PROMPT+COMPLETION, both in tokens, such as 1024+3072")
    return int(found[1]), int(found[2])


def _table(asked: MemorySettings, found: MemoryEstimate) -> Table:
    table = Table("learner" if asked.ranks == 1 else f"each of {asked.ranks} ranks", "GiB")
    table.columns[1].justify = "right"
    for part, size in found.parts.items():
        table.add_row(part.value, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("peak", f"{found.total / GIB:.2f}")
    return table


def _pass_of(asked: MemorySettings, found: MemoryEstimate) -> str:
    policy = asked.policy
    checkpointing = "with" if policy.gradient_checkpointing else "without"
    trained = f"rank {policy.rank}" if asked.parameters == "adapter" else "all parameters"
    rows = asked.group_rows * asked.groups
    return (
        f"The largest pass holds {found.rows} of a step's {rows} rows of {asked.prompt} + {asked.completion} tokens; "
        f"{policy.dtype}, {trained}, {checkpointing} gradient checkpointing, device {policy.device}."
    )


def _ranks_of(asked: MemorySettings, found: MemoryEstimate) -> str:
    """What the ranks share, and on a CPU the memory of all of them."""
    shared = (
        f"The layers of the base are divided among {asked.ranks} ranks, and the passes of a step are dealt to them; "
        "embeddings, head, adapter, gradients and optimizer state are whole on each."
    )
    if asked.policy.device != "cpu":
        return shared
    return f"{shared} On one machine they take {asked.ranks * found.total / GIB:.2f} GiB together."


def verdict(asked: MemorySettings, found: MemoryEstimate, device_memory: float) -> list[str]:
    """Whether the device of a rank, of some GiB, holds the estimate, and otherwise the fields to change."""
    wanted = found.total * (1 + MARGIN) / GIB
    size = f"{wanted:.2f} GiB with a margin of {MARGIN:.0%}, of {device_memory:g} GiB"
    if found.fits(device_memory * GIB):
        return [f"fits: {size}"]
    return [f"does not fit: {size}. What would lower it:", *(f"  {line}" for line in changes(asked, found))]
