"""The command `kestrl sft`: supervised fine-tuning on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kestrl._app.checks.sft import device_environment, located
from kestrl._app.cli.options import DEFAULT_RUNS, Overrides, Runs
from kestrl._app.local.files import write_atomic
from kestrl._app.local.processes import require_services
from kestrl._shared.plan.components import TORCH_DEFAULTS
from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.spec.sft import read_sft_job
from kestrl.errors import UserInputError
from kestrl.storage import open_store
from kestrl.storage.layout import SUMMARY

SETTINGS = "settings.json"
"""File of an SFT run's folder; the run of a job has none of this name there."""
SFTManifest = Annotated[Path, typer.Argument(help="The SFTJob manifest.", show_default=False)]


def sft(manifest: SFTManifest, set_: Overrides = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Fine-tune an adapter or a model on conversations, and print its address at the end. Resumes a run that was
    stopped.
    """
    code, _ = _train(manifest, tuple(set_ or ()), runs)
    raise typer.Exit(code)


def fine_tuned(manifest: Path, overrides: tuple[str, ...], runs: Path) -> str:
    """The field of an AgentRLJob that begins with the result of an SFT job, as an override; the job is run, resumed, or
    found finished. What its program prints goes to standard error.

    Raises:
        typer.Exit: It failed or was interrupted, with its code.
        StorageError: Its summary cannot be read.
    """
    code, settings = _train(manifest, overrides, runs, output=sys.stderr.fileno())
    if code:
        raise typer.Exit(code)
    summary = json.loads(open_store(settings.storage).get(SUMMARY))
    field = "model.base" if settings.parameters == "all" else "model.adapter.from"
    return f"{field}={json.dumps(summary['policy']['uri'])}"


def _train(
    manifest: Path, overrides: tuple[str, ...], runs: Path, *, output: int | None = None
) -> tuple[int, SFTSettings]:
    """Exit code and settings of a training program that has ended."""
    require_services(["kestrl-learner"])
    job = read_sft_job(manifest, overrides)
    folder = runs / f"{job.metadata.name}-sft"
    settings = located(job, base=manifest.resolve().parent, folder=folder)
    environment = {**TORCH_DEFAULTS, **os.environ, **device_environment(job)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / SETTINGS, settings.model_dump_json(indent=2))
    except OSError as error:
        raise UserInputError(
            f"{folder}: cannot be made: {error.strerror}; choose another folder with --runs"
        ) from error
    # Training needs torch, which only the learner depends on; it runs as a separate program.
    command = [sys.executable, "-m", "kestrl_learner.sft", "--settings", str(folder / SETTINGS)]
    process = subprocess.Popen(command, env=environment, stdout=output)  # noqa: S603 - our own module
    while True:
        try:
            return process.wait(), settings
        except KeyboardInterrupt:  # the program has it, too, and ends after its step
            continue


def register(app: typer.Typer) -> None:
    app.command()(sft)
