"""Commands for the adapters of a run: eval and export."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kestrl._app.cli.options import DEFAULT_RUNS, RunId, Runs
from kestrl._app.cli.sft import SETTINGS
from kestrl._app.local.observation import run_store
from kestrl._app.local.rundir import find_run
from kestrl._shared.plan.components import TORCH_DEFAULTS
from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.sft import SFTSettings
from kestrl.data.locate import locate_model
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import ObjectStore, adapter_folders, fetch_adapter, open_store, read_manifest
from kestrl.storage.models import fetch_model, model_folders

console = Console()
errors = Console(stderr=True)
BASE = "base"


def choose_adapter(store: ObjectStore, step: int | None, run: str) -> str:
    """The folder of a step's adapter, or of the newest.

    Args:
        store: Of the run.
        step: Of the adapter; None for the newest.
        run: Id of the run, for messages.

    Raises:
        UserInputError: There is none.
    """
    steps = {read_manifest(store, folder).step: folder for folder in adapter_folders(store)}
    if not steps:
        raise UserInputError(
            f"{run} has learned nothing: there is no published adapter; start it again, or name another run"
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise UserInputError(f"{run} has no published adapter of step {step} (there are: {known})")
    return steps[max(steps) if step is None else step]


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run whose adapters are exported."""

    id: str
    store: ObjectStore
    base_model: Callable[[], str]
    """Folder or Hugging Face id of the model below the adapters; raises UserInputError if there is none."""


def trained_run(runs: Path, run_id: str | None) -> TrainedRun:
    """The run of a job, or of `kestrl sft`.

    Raises:
        UserInputError: There is no such run, or its files are damaged.
    """
    if run_id is not None and (settings := runs / run_id / SETTINGS).is_file():
        made = read_settings(SFTSettings, settings)
        return TrainedRun(run_id, open_store(made.storage), lambda: made.model)
    run = find_run(runs, run_id)
    return TrainedRun(run.id, run_store(run), lambda: locate_model(run.job().spec.model.base, base=run.manifest_dir))


def export(
    out: Annotated[Path, typer.Option("--out", help="Folder to create; it must not exist yet.")],
    run_id: RunId = None,
    step: Annotated[int | None, typer.Option(help="Step of the adapter (default: the newest).")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base model.")] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Export an adapter of a run with every digest verified, or the merged model with --merge. Of a run of `kestrl sft`
    that trained all parameters, export the model.

    A run of `kestrl sft` is named by its folder, NAME-sft.
    """
    if out.exists():
        raise UserInputError(f"--out: {out} exists already; name a new folder")
    trained = trained_run(runs, run_id)
    store = trained.store
    if folders := model_folders(store):
        if merge or step is not None:
            raise UserInputError("--merge, --step: the run trained all parameters and has one model; leave them out")
        out.parent.mkdir(parents=True, exist_ok=True)
        console.print(f"{fetch_model(store, out, folders[-1]).policy.name} -> {out}", soft_wrap=True, markup=False)
        return
    folder = choose_adapter(store, step, trained.id)
    if read_manifest(store, folder).step == 0:
        errors.print(
            f"warning: {trained.id} has learned nothing by step 0: this is the adapter that it began with",
            markup=False,
            soft_wrap=True,
        )
    if not merge:
        out.parent.mkdir(parents=True, exist_ok=True)
        manifest = fetch_adapter(store, out, folder)
        console.print(f"{manifest.policy.name} -> {out}", soft_wrap=True, markup=False)
        return
    model = trained.base_model()
    scratch = out.with_name(out.name + ".adapter")
    manifest = fetch_adapter(store, scratch, folder)
    # Merging needs torch, which only the learner depends on; it runs as a separate program.
    command = [
        sys.executable,
        "-m",
        "kestrl_learner.model.merge",
        "--model",
        model,
        "--adapter",
        str(scratch),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, check=False, env={**TORCH_DEFAULTS, **os.environ})  # noqa: S603 - our own module
    for file in scratch.iterdir():
        file.unlink()
    scratch.rmdir()
    if done.returncode != 0:
        raise StorageError(f"merging {manifest.policy.name} into {model} failed with exit status {done.returncode}")
    console.print(f"{model} + {manifest.policy.name} -> {out}", soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    app.command()(export)
