"""The job whose engine and options serve a policy: that of its run, or a small one for a run of `kestrl sft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrl._app.local.check import fitted_job
from kestrl._app.local.site import local_path
from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl._shared.spec.load import with_overrides
from kestrl.data.locate import locate_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """A base model and the engine that serves it."""

    job: AgentRLJob
    base: Path
    """Folder that the job's paths are relative to."""
    model: str
    """Folder or Hugging Face id of the base model."""
    template: str | None
    """File of the chat template; None for the model's own."""


def job_of_run(document: Mapping[str, Any] | None, overrides: Sequence[str], base: Path) -> ServingJob:
    """The job of a run, with overrides.

    Args:
        document: The run's job.
        overrides: Of the job's fields.
        base: Folder of the manifest.

    Raises:
        UserInputError: A field is not valid, or model or template do not exist.
    """
    job = fitted_job(parse_job(with_overrides(document, overrides)), base)
    template = job.spec.agent.template
    uri = None if template is None else template.uri
    return ServingJob(
        job=job,
        base=base,
        model=locate_model(job.spec.model.base, base=base),
        template=None if uri is None else local_path(uri, base, "spec.agent.template.uri"),
    )


def job_of_sft(settings: SFTSettings, model: str, overrides: Sequence[str]) -> ServingJob:
    """A job for the engine of a run of `kestrl sft`.

    Args:
        settings: Of the run.
        model: Folder or Hugging Face id of the model to serve.
        overrides: Of the job's fields, such as inference.engine=sglang.

    Raises:
        UserInputError: A field is not valid, or the model does not exist.
    """
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": settings.job},
        "spec": {
            "model": {"base": model, "dtype": settings.dtype, "adapter": {"rank": max(1, settings.rank)}},
            "data": {"train": {"uri": "none.jsonl"}},
            "rewards": [{"rule": "format"}],
        },
    }
    job = fitted_job(parse_job(with_overrides(document, overrides)), Path.cwd())
    return ServingJob(job=job, base=Path.cwd(), model=model, template=settings.template)
