"""The check of an SFTJob on this machine, and its settings with its files found."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from kestrl._app.local.check import model_config
from kestrl._app.local.devices import usable_devices
from kestrl._app.local.findings import Findings
from kestrl._shared.checking import ask
from kestrl._shared.plan.devices import LEARNER, VISIBLE, Need, assigned_devices, device_variables
from kestrl._shared.plan.sft import SFTSettings, sft_settings
from kestrl._shared.plan.site import BUILDS
from kestrl._shared.spec.rules.model_rules import positions
from kestrl._shared.spec.sft import Conversations, SFTJob
from kestrl.data.locate import locate_data, locate_model
from kestrl.errors import UserInputError, problems_of

CHECK_SECONDS = 900.0
"""Time limit of rendering the conversations."""


def check_sft_job(job: SFTJob, base: Path) -> Findings:
    """Checks what a job references: model, tokenizer and template, and each conversation's rows of tokens.

    Args:
        job: A job from a valid manifest.
        base: The manifest's folder.
    """
    findings = Findings(unit="conversations")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            settings = located(job, base=base, folder=Path(scratch))
        except UserInputError as error:
            findings.problems += problems_of(error)
            return findings
        report = ask("kestrl_learner.sft.check", settings, subject="spec.data", seconds=CHECK_SECONDS)
    findings.problems += report.problems
    findings.warnings += report.facts.get("warnings", ())
    findings.rows = dict(report.facts.get("conversations", {}))
    findings.problems += _position_problems(settings.model, int(report.facts.get("longest", 0)))
    if report.missing:
        findings.warnings.append(f"{report.missing} is not installed; the conversations were not read")
    return findings


def _position_problems(model: str, tokens: int) -> Iterator[str]:
    """A problem where a conversation has more tokens than the model has positions.

    Args:
        model: Folder, or a Hugging Face id, whose configuration is read when it is loaded.
        tokens: Tokens of the longest row.
    """
    limit = positions(model_config(model))
    if limit is not None and tokens > limit:
        yield (
            f"spec.training.maxTokens: a conversation has {tokens} tokens, and the model {limit} positions; set it to "
            f"{limit}, so that longer ones are left out"
        )


def located(job: SFTJob, *, base: Path, folder: Path) -> SFTSettings:
    """The settings of a job with its files found.

    Args:
        job: The manifest.
        base: The manifest's folder.
        folder: Of the run, for generated data.

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
