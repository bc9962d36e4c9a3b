"""The check of a Threshold: the jobs that it names, and whether its metric and plateau can be had of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kestrl._app.checks.sft import check_sft_job
from kestrl._app.local.check import check_job
from kestrl._app.local.findings import Findings
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl._shared.spec.sft import read_sft_job
from kestrl._shared.spec.threshold import Threshold, ThresholdSpec
from kestrl.errors import UserInputError, problems_of


def check_threshold(threshold: Threshold, base: Path, overrides: Sequence[str]) -> Findings:
    """Checks the job of a threshold, and its SFT job if it has one.

    Args:
        threshold: A valid threshold.
        base: Folder of its file.
        overrides: Of the job's fields.
    """
    spec, findings = threshold.spec, Findings(unit="")
    if spec.sft is not None:
        _take(findings, f"spec.sft: {spec.sft}", lambda: _sft_findings(base / str(spec.sft)))
    _take(findings, f"spec.job: {spec.job}", lambda: _job_findings(spec, base / spec.job, overrides))
    return findings


def _take(findings: Findings, place: str, check: Callable[[], Findings]) -> None:
    """Adds the findings of a manifest, each with its place."""
    try:
        manifest = check()
    except UserInputError as error:
        findings.problems += [f"{place}: {problem}" for problem in problems_of(error)]
        return
    findings.problems += [f"{place}: {problem}" for problem in manifest.problems]
    findings.warnings += [f"{place}: {warning}" for warning in manifest.warnings]
    findings.rows |= {f"{name} {manifest.unit}": count for name, count in manifest.rows.items()}


def _sft_findings(path: Path) -> Findings:
    return check_sft_job(read_sft_job(path), path.parent)


def _job_findings(spec: ThresholdSpec, path: Path, overrides: Sequence[str]) -> Findings:
    job = read_job(path, overrides)
    with tempfile.TemporaryDirectory() as cache:
        findings = check_job(job, base=path.resolve().parent, cache_dir=Path(cache))
    findings.problems += threshold_problems(spec, job)
    return findings


def threshold_problems(spec: ThresholdSpec, job: AgentRLJob) -> Iterator[str]:
    """Why a job cannot be judged by a threshold."""
    if job.spec.data.validation is None:
        yield "spec.data.validation: is missing, and a threshold judges evaluations of validation data"
    if spec.plateau.evaluations > 1 and job.spec.schedule.eval_every is None:
        yield (f"spec.schedule.evalEvery: must be set, as the plateau takes {spec.plateau.evaluations} evaluations")
