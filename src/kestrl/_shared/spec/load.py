"""Loads a job from YAML and `--set` overrides, and reports all problems at once with path and fix."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from kestrl._shared.safe_yaml import read as read_yaml
from kestrl._shared.safe_yaml import read_all as read_all_yaml
from kestrl._shared.spec.job import AgentRLJob
from kestrl._shared.spec.problems import LONGEST_SHOWN, Problem, ProblemsError
from kestrl._shared.spec.rules.job_rules import check
from kestrl._shared.spec.validation import validated
from kestrl.errors import UserInputError

UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML for invalid YAML; invalid dates and numbers are ValueErrors, deep nesting is a RecursionError."""

COMMANDS: Mapping[str, str] = {"AgentRLJob": "run", "SFTJob": "sft", "Threshold": "verify"}
"""Command of each kind of file."""


def parse_job(document: Any) -> AgentRLJob:
    """A job from a parsed manifest.

    Raises:
        ProblemsError: With every problem at once.
    """
    job = validated(AgentRLJob, document)
    problems = check(job.spec)
    if problems:
        raise ProblemsError(problems)
    return job


def with_overrides(document: Any, overrides: Sequence[str]) -> Any:
    """The manifest with `path=value` overrides applied; values are YAML: `algorithm.groupSize=4`.

    Paths are relative to `spec`, except those that begin with `metadata.`.

    Raises:
        ProblemsError: An override is malformed.
    """
    if not overrides:
        return document
    changed = copy.deepcopy(document)
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator or not path:
            raise ProblemsError([Problem("--set", f"{override!r} is not of the form path=value")])
        _assign(changed, path, _yaml_value(override, value))
    return changed


def _yaml_value(override: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except UNREADABLE as error:
        excerpt = override if len(override) <= LONGEST_SHOWN else f"{override[:LONGEST_SHOWN]}..."
        raise ProblemsError([Problem("--set", f"the value of {excerpt!r} is not YAML: {_reason(error)}")]) from error


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _assign(document: Any, path: str, value: Any) -> None:
    parts = path.removeprefix("spec.").replace("[", ".").replace("]", "").split(".")
    if not isinstance(document, dict):
        raise ProblemsError([Problem("manifest", f"must be an object, is {type(document).__name__}")])
    manifest = cast("dict[str, Any]", document)
    place: Any = manifest if parts[0] == "metadata" else manifest.setdefault("spec", {})
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        key = _key(place, part)
        if key is None:
            raise ProblemsError([Problem("--set", f"{path}: there is no {part!r} to set")])
        if last:
            place[key] = value
        elif isinstance(key, str) and place.get(key) is None:
            place[key] = {}
            place = place[key]
        else:
            place = place[key]


def _key(place: Any, part: str) -> str | int | None:
    """Index or key that `part` means in `place`; None if there is none."""
    if isinstance(place, list):
        return int(part) if part.isdigit() and int(part) < len(cast("Sequence[Any]", place)) else None
    return part if isinstance(place, dict) else None


def read_job(path: Path, overrides: Sequence[str] = ()) -> AgentRLJob:
    """Reads a manifest file.

    Raises:
        ProblemsError: With every problem at once.
        UserInputError: The file cannot be read or is not YAML.
    """
    return parse_job(with_overrides(read_kind(path, AgentRLJob.__name__), overrides))


def read_kind(path: Path, kind: str) -> Any:
    """The one YAML document of a file of a kind, not yet validated.

    Raises:
        UserInputError: The file cannot be read, is not YAML, holds another number of documents, or one of another kind
            that KestRL reads.
    """
    document = read_document(path, kind)
    document_kind = _kind_of(document)
    if document_kind != kind and document_kind in COMMANDS:
        raise UserInputError(
            f"{path}: kind: is {document_kind}, for `kestrl {COMMANDS[document_kind]}`; this command reads {kind}s"
        )
    return document


def file_kind(path: Path) -> str:
    """The kind of a file's document, such as `SFTJob`; that of a job where it has none that KestRL reads.

    Raises:
        UserInputError: The file cannot be read, is not YAML, or holds another number of documents.
    """
    kind = _kind_of(read_document(path, AgentRLJob.__name__))
    return kind if kind in COMMANDS else AgentRLJob.__name__


def _kind_of(document: Any) -> str:
    return str(cast("Mapping[str, Any]", document).get("kind")) if isinstance(document, Mapping) else ""


def read_document(path: Path, kind: str) -> Any:
    """The one YAML document of a file.

    Args:
        path: The manifest.
        kind: The expected kind, for the message.

    Raises:
        UserInputError: The file cannot be read, is not YAML, or holds another number of documents.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        documents = [item for item in read_all_yaml(text) if item is not None]
    except UNREADABLE as error:
        raise UserInputError(f"{path}: not YAML: {_reason(error)}") from error
    if len(documents) != 1:
        raise UserInputError(f"{path}: holds {len(documents)} documents; one {kind} is expected")
    return documents[0]
