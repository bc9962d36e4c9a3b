"""Loads a job from YAML and `--set` overrides, and reports all problems at once with path and fix."""

from __future__ import annotations

import copy
import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kestrl._shared.safe_yaml import read as read_yaml
from kestrl._shared.safe_yaml import read_all as read_all_yaml
from kestrl._shared.spec.job import AgentRLJob
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.rules.job_rules import check
from kestrl.errors import UserInputError

UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML for invalid YAML; invalid dates and numbers are ValueErrors, deep nesting is a RecursionError."""
LONGEST_SHOWN = 200


ELSEWHERE: Mapping[str, str] = {
    f"spec.sampling.{name}": "training samples from all tokens, since the learner computes log-probs over all of them; "
    f"for evaluations set spec.evaluation.{name}"
    for name in ("topP", "topK")
}
"""Fields that there are not, with what to do instead."""


COMMANDS: Mapping[str, str] = {"AgentRLJob": "run", "SFTJob": "sft", "Threshold": "verify"}
"""Command of each kind of file."""


class ProblemsError(UserInputError):
    """An invalid manifest, with all problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif (
            "[" not in part
        ):  # pydantic adds names of union members and validators, which are not fields of the manifest
            path += f".{part}" if path else part
    return path


def _fields_at(location: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    """Fields of the manifest at a location, for suggestions."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            continue
        fields = {} if model is None else model.model_fields
        found = next((field for field in fields.values() if field.alias == part), None)
        if found is None:
            return []
        model = _inner_model(found.annotation)
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """Model inside `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        model = _inner_model(inner)
        if model is not None:
            return model
    return None


def explain(error: ErrorDetails, root: type[BaseModel]) -> Problem:
    """The problem behind an error of pydantic, in a manifest of the kind `root`."""
    location = error["loc"]
    path = _path(location)
    if error["type"] == "extra_forbidden":
        if path in ELSEWHERE:
            return Problem(path, ELSEWHERE[path])
        near = difflib.get_close_matches(str(location[-1]), known := _fields_at(location[:-1], root), n=1)
        fix = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}" if known else "remove it"
        return Problem(path, f"unknown field; {fix}")
    if error["type"] == "missing":
        return Problem(path, "is required; add it")
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    if len(repr(given)) > LONGEST_SHOWN:
        return Problem(path, message)
    shown = (
        f" (is {given!r})" if isinstance(given, str | int | float | bool | None) and repr(given) not in message else ""
    )
    return Problem(path, f"{message}{shown}")


def parse_job(document: Any) -> AgentRLJob:
    """A job from a parsed manifest.

    Raises:
        ProblemsError: With every problem at once.
    """
    if not isinstance(document, Mapping):
        raise ProblemsError([Problem("manifest", f"must be an object, is {type(document).__name__}")])
    try:
        job = AgentRLJob.model_validate(document)
    except ValidationError as error:
        raise ProblemsError(list(dict.fromkeys(explain(item, AgentRLJob) for item in error.errors()))) from error
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
        shown = override if len(override) <= LONGEST_SHOWN else f"{override[:LONGEST_SHOWN]}..."
        raise ProblemsError([Problem("--set", f"the value of {shown!r} is not YAML: {_reason(error)}")]) from error


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _assign(document: Any, path: str, value: Any) -> None:
    parts = path.removeprefix("spec.").replace("[", ".").replace("]", "").split(".")
    if not isinstance(document, dict):
        raise ProblemsError([Problem("manifest", f"must be an object, is {type(document).__name__}")])
    whole = cast("dict[str, Any]", document)
    place: Any = whole if parts[0] == "metadata" else whole.setdefault("spec", {})
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
    found = _kind_of(document)
    if found != kind and found in COMMANDS:
        raise UserInputError(f"{path}: kind: is {found}, for `kestrl {COMMANDS[found]}`; this command reads {kind}s")
    return document


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
