"""The command `kestrl sft`: supervised fine-tuning on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kestrl._app.cli.options import DEFAULT_RUNS, Overrides, Runs
from kestrl._app.local.devices import usable_devices
from kestrl._app.local.files import write_atomic
from kestrl._app.local.processes import require_services
from kestrl._shared.plan.components import TORCH_DEFAULTS
from kestrl._shared.plan.devices import LEARNER, VISIBLE, Need, assigned_devices, device_variables
from kestrl._shared.plan.sft import SFTSettings, sft_settings
from kestrl._shared.plan.site import BUILDS
from kestrl._shared.spec.sft import Conversations, SFTJob, read_sft_job
from kestrl.data.locate import locate_data, locate_model
from kestrl.errors import UserInputError
from kestrl.storage import open_store
from kestrl.storage.layout import SUMMARY

SETTINGS = "settings.json"
"""File of an SFT run's folder; the run of a job has none of this name there."""
SFTManifest = Annotated[Path, typer.Argument(help="The SFTJob manifest.", show_default=False)]


def located(job: SFTJob, *, base: Path, folder: Path) -> SFTSettings:
    """The settings of a job with its files found.

    Args:
        job: The manifest.
        base: The manifest's folder.
        folder: Of the run.

    Raises:
        UserInputError: A file does not exist; the message names its field.
    """
    spec = job.spec
    template = None if spec.template is None else base / spec.template
    if template is not None and not template.is_file():
        raise UserInputError(f"spec.template: {template} does not exist")

    def file_of(data: Conversations | None, field: str) -> str | None:
        if data is None or data.uri is None:
            return None
        return str(
            locate_data(
                data.uri, size=data.size, base=base, seed=spec.data.seed, cache_dir=folder / ".data", field=field
            )
        )

    return sft_settings(
        job,
        model=locate_model(spec.model.base, base=base),
        train=file_of(spec.data.train, "spec.data.train.uri"),
        validation=file_of(spec.data.validation, "spec.data.validation.uri"),
        template=None if template is None else str(template.resolve()),
        storage=f"{spec.storage.uri.rstrip('/')}/{job.metadata.name}"
        if spec.storage.uri
        else (folder / "store").resolve().as_uri(),
    )


def sft(manifest: SFTManifest, set_: Overrides = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Fine-tune an adapter or a model on conversations, and print its address at the end. Resumes a run that was
    stopped.
    """
    code, _ = _train(manifest, tuple(set_ or ()), runs)
    raise typer.Exit(code)


def fine_tuned(manifest: Path, overrides: tuple[str, ...], runs: Path) -> str:
    """The field of an AgentRLJob that begins with the result of an SFT job, as an override; the job is run, resumed, or
    found finished.

    Raises:
        typer.Exit: It failed or was interrupted, with its code.
        StorageError: Its summary cannot be read.
    """
    code, settings = _train(manifest, overrides, runs)
    if code:
        raise typer.Exit(code)
    summary = json.loads(open_store(settings.storage).get(SUMMARY))
    field = "model.base" if settings.parameters == "all" else "model.adapter.from"
    return f"{field}={json.dumps(summary['policy']['uri'])}"


def device_environment(job: SFTJob) -> dict[str, str]:
    """Variables that restrict the ranks to a device each; none on a CPU, or where the manifest names one device.

    Raises:
        UserInputError: There are not enough devices, or they cannot be listed.
    """
    kind, _, number = job.spec.learner.device.partition(":")
    profile = next((profile for profile, build in BUILDS.items() if build.device == kind), "cpu")
    if number or profile not in VISIBLE:
        return {}
    need = Need(component=LEARNER, profile=profile, count=job.spec.learner.ranks)
    available = {profile: [device.index for device in usable_devices(profile)]}
    return device_variables(profile, assigned_devices([need], available)[LEARNER])


def _train(manifest: Path, overrides: tuple[str, ...], runs: Path) -> tuple[int, SFTSettings]:
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
    process = subprocess.Popen(command, env=environment)  # noqa: S603 - our own module
    while True:
        try:
            return process.wait(), settings
        except KeyboardInterrupt:  # the program has it, too, and ends after its step
            continue


def register(app: typer.Typer) -> None:
    app.command()(sft)
