"""The job whose engine and options serve a policy: that of its run, or a small one for a run of `kestrl sft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kestrl._app.local.check import fitted_job
from kestrl._app.local.site import local_path
from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl._shared.spec.load import with_overrides
from kestrl.data.locate import locate_model
from kestrl.formats.registry import BUILT_IN


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
    tool_calls: str | None
    """Name of the built-in format in which the model writes calls of tools; None if it is not known."""


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
    model = locate_model(job.spec.model.base, base=base)
    file = None if uri is None else local_path(uri, base, "spec.agent.template.uri")
    calls = written_format(model, file, job.spec.agent.tool_call_format)
    return ServingJob(job=job, base=base, model=model, template=file, tool_calls=calls)


def written_format(model: str, template: str | None, format_name: str | None) -> str | None:
    """Name of the built-in format in which a model writes calls of tools: the named one, or that of its chat template.

    Args:
        model: Folder or Hugging Face id of the model.
        template: File of the chat template; None for the model's own.
        format_name: Format that the job names.

    Raises:
        UserInputError: Tokenizer or template cannot be used.
    """
    if format_name is not None:
        return format_name if format_name in BUILT_IN else None
    from kestrl._shared.text.chat_model import load_model  # a tokenizer's library is slow to import

    chat = load_model(model, template, tools=False, started=datetime.now(tz=UTC))
    return chat.format.name if chat.detected and chat.format.name in BUILT_IN else None


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
    calls = written_format(model, settings.template, None)
    return ServingJob(job=job, base=Path.cwd(), model=model, template=settings.template, tool_calls=calls)
