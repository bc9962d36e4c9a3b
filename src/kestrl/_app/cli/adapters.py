"""Commands for the adapters of a run: eval and export."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from kestrl.storage.summary import read_summary

if TYPE_CHECKING:  # the client of the Hub is imported where it is used
    from kestrl._app.push.model_repository import ModelRepository

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
        published_steps = ", ".join(map(str, sorted(steps)))
        raise UserInputError(f"{run} has no published adapter of step {step} (there are: {published_steps})")
    return steps[max(steps) if step is None else step]


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run whose adapters are exported."""

    id: str
    store: ObjectStore
    base_model: Callable[[], str]
    """Folder or Hugging Face id of the model below the adapters; raises UserInputError if there is none."""
    base: str
    """The same model as the manifest names it, or its folder."""
    data: Sequence[str]
    """The data that it was trained on, as the manifest names them, or their files."""


def trained_run(runs: Path, run_id: str | None) -> TrainedRun:
    """The run of a job, or of `kestrl sft`.

    Raises:
        UserInputError: There is no such run, or its files are damaged.
    """
    if run_id is not None and (settings := runs / run_id / SETTINGS).is_file():
        sft_settings = read_settings(SFTSettings, settings)
        data = [name for name in (sft_settings.train.path, sft_settings.train.episodes) if name is not None]
        return TrainedRun(
            run_id, open_store(sft_settings.storage), lambda: sft_settings.model, base=sft_settings.model, data=data
        )
    run = find_run(runs, run_id)
    spec = run.job().spec
    return TrainedRun(
        run.id,
        run_store(run),
        lambda: locate_model(spec.model.base, base=run.manifest_dir),
        base=spec.model.base,
        data=[spec.data.train.uri],
    )


def export(
    out: Annotated[Path | None, typer.Option("--out", help="Folder to create; it must not exist yet.")] = None,
    run_id: RunId = None,
    step: Annotated[int | None, typer.Option(help="Step of the adapter (default: the newest).")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base model.")] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="hf://ORG/NAME", help="Also upload it to the Hugging Face Hub, with a card."),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Export an adapter of a run with every digest verified, or the merged model with --merge. Of a run of `kestrl sft`
    that trained all parameters, export the model.

    A run of `kestrl sft` is named by its folder, NAME-sft.
    """
    export_run(lambda: trained_run(runs, run_id), out, step=step, merge=merge, push=push)


def export_run(
    find: Callable[[], TrainedRun], out: Path | None, *, step: int | None, merge: bool, push: str | None
) -> None:
    """Exports an adapter or the model of a run into a folder, to the Hub, or both.

    Args:
        find: Finds the run, once the other arguments are seen to be right.
        out: The folder to create.
        step: Step of the adapter; None for the newest.
        merge: Whether the adapter is merged into the base model.
        push: Address of a repository.

    Raises:
        UserInputError: An argument is wrong, or the run has nothing to export.
    """
    if out is None and push is None:
        raise UserInputError("--out: name a folder to create, or a repository with --push hf://ORG/NAME")
    if out is not None and out.exists():
        raise UserInputError(f"--out: {out} exists already; name a new folder")
    trained = find()
    repository = None if push is None else _repository(push)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kestrl-export-"))) / "exported"
        name, adapter = _exported(trained, folder, step, merge=merge)
        if out is not None:
            console.print(f"{name} -> {out}", soft_wrap=True, markup=False)
        if repository is not None:
            address = _pushed(repository, trained, folder, name, adapter=adapter)
            console.print(f"{name} -> {address}", soft_wrap=True, markup=False)


def _exported(trained: TrainedRun, out: Path, step: int | None, *, merge: bool) -> tuple[str, bool]:
    """Writes what is exported into a new folder; returns its name, and whether it is an adapter."""
    store = trained.store
    if folders := model_folders(store):
        if merge or step is not None:
            raise UserInputError("--merge, --step: the run trained all parameters and has one model; leave them out")
        out.parent.mkdir(parents=True, exist_ok=True)
        return fetch_model(store, out, folders[-1]).policy.name, False
    folder = choose_adapter(store, step, trained.id)
    if read_manifest(store, folder).step == 0:
        errors.print(
            f"warning: {trained.id} has learned nothing by step 0: this is the adapter that it began with",
            markup=False,
            soft_wrap=True,
        )
    if not merge:
        out.parent.mkdir(parents=True, exist_ok=True)
        return fetch_adapter(store, out, folder).policy.name, True
    return _merged(trained, out, folder), False


def _merged(trained: TrainedRun, out: Path, folder: str) -> str:
    """Writes the model with an adapter merged into it; returns its name."""
    model = trained.base_model()
    scratch = out.with_name(out.name + ".adapter")
    manifest = fetch_adapter(trained.store, scratch, folder)
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
    process = subprocess.run(command, check=False, env={**TORCH_DEFAULTS, **os.environ})  # noqa: S603 - our own module
    for file in scratch.iterdir():
        file.unlink()
    scratch.rmdir()
    if process.returncode != 0:
        raise StorageError(f"merging {manifest.policy.name} into {model} failed with exit status {process.returncode}")
    return f"{model} + {manifest.policy.name}"


def _repository(address: str) -> ModelRepository:
    from kestrl._app.push.model_repository import ModelRepository

    return ModelRepository(address)


def _pushed(repository: ModelRepository, trained: TrainedRun, folder: Path, name: str, *, adapter: bool) -> str:
    """Uploads a folder with a card; returns the address of the commit."""
    from kestrl._app.push.model_card import PATHS, Exported, model_card, public_config

    exported = Exported(
        name=name.rpartition(" + ")[2],
        base=trained.base,
        data=trained.data,
        adapter=adapter,
        version=version("kestrl"),
        summary=read_summary(trained.store),
    )
    configs = {path.name: path.read_text(encoding="utf-8") for path in map(folder.joinpath, PATHS) if path.is_file()}
    texts = {name: public_config(name, text, trained.base) for name, text in configs.items()}
    texts["README.md"] = model_card(exported, repository.id)
    return repository.upload(folder, texts, f"Export {exported.name} by KestRL {exported.version}")


def register(app: typer.Typer) -> None:
    app.command()(export)
