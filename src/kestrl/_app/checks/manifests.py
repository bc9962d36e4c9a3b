"""The check of a manifest of any kind."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.checks.accelerators import known_devices
from kestrl._app.checks.sft import check_sft_job
from kestrl._app.checks.thresholds import check_threshold
from kestrl._app.local.check import check_job
from kestrl._app.local.findings import Findings
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl._shared.spec.load import file_kind
from kestrl._shared.spec.sft import SFTJob, read_sft_job
from kestrl._shared.spec.threshold import Threshold, read_threshold
from kestrl.errors import UserInputError, problems_of

Manifest = AgentRLJob | SFTJob | Threshold


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A valid manifest and the folder that its paths are relative to."""

    manifest: Manifest
    base: Path
    overrides: tuple[str, ...]
    """Overrides of fields, of which a Threshold's job is read with."""


def read_manifest(path: Path, overrides: Sequence[str]) -> ReadManifest:
    """Reads a manifest of any kind.

    Raises:
        UserInputError: The file cannot be read, or its fields are not valid.
    """
    base, field_overrides = path.resolve().parent, tuple(overrides)
    kind = file_kind(path)
    if kind == SFTJob.__name__:
        return ReadManifest(read_sft_job(path, field_overrides), base, field_overrides)
    if kind == Threshold.__name__:
        return ReadManifest(read_threshold(path), base, field_overrides)
    return ReadManifest(read_job(path, field_overrides), base, field_overrides)


def refused(error: UserInputError) -> Findings:
    """The findings of a manifest that cannot be read."""
    return Findings(problems=list(problems_of(error)))


def job_of(parsed_manifest: ReadManifest) -> tuple[AgentRLJob, Path]:
    """The job that is run for an AgentRLJob or a Threshold, and its folder.

    Raises:
        UserInputError: A threshold's job is not valid.
    """
    if isinstance(parsed_manifest.manifest, Threshold):
        path = parsed_manifest.base / parsed_manifest.manifest.spec.job
        return read_job(path, parsed_manifest.overrides), path.resolve().parent
    assert isinstance(parsed_manifest.manifest, AgentRLJob)
    return parsed_manifest.manifest, parsed_manifest.base


def add_devices(findings: Findings, parsed_manifest: ReadManifest, runs: Path) -> None:
    """Adds what is known of this machine's devices for a valid job, with the estimates kept beside the runs."""
    if findings.problems or isinstance(parsed_manifest.manifest, SFTJob):
        return
    job, base = job_of(parsed_manifest)
    lines, warnings = known_devices(job, base, runs)
    findings.devices += lines
    findings.warnings += warnings


def check_manifest(parsed_manifest: ReadManifest, *, data: bool, model: bool, engine: bool | None = None) -> Findings:
    """Checks everything that a manifest references.

    Args:
        parsed_manifest: The manifest.
        data: Whether to read the data sets of a job.
        model: Whether to load the tokenizer and the chat template of a job.
        engine: Whether to look for the engine; None: where the job names an interpreter for it.
    """
    if isinstance(parsed_manifest.manifest, SFTJob):
        return check_sft_job(parsed_manifest.manifest, parsed_manifest.base)
    if isinstance(parsed_manifest.manifest, Threshold):
        return check_threshold(parsed_manifest.manifest, parsed_manifest.base, parsed_manifest.overrides)
    with tempfile.TemporaryDirectory() as cache:
        return check_job(
            parsed_manifest.manifest,
            base=parsed_manifest.base,
            cache_dir=Path(cache),
            data=data,
            model=model,
            engine=engine,
        )
