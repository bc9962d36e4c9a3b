"""A manifest as an object of its kind, or everything that is wrong in it: errors of pydantic as problems with path and
fix.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kestrl._shared.spec.problems import LONGEST_SHOWN, Problem, ProblemsError
from kestrl._shared.spec.words import spelled, words_in

MOST_PLACES = 3
"""Fields of a name that a message lists."""
ELSEWHERE: Mapping[str, str] = {
    f"spec.sampling.{name}": "training samples from all tokens, since the learner computes log-probs over all of them; "
    f"for evaluations set spec.evaluation.{name}"
    for name in ("topP", "topK")
}
"""Fields that there are not, with what to do instead."""

Kind = TypeVar("Kind", bound=BaseModel)


def validated(kind: type[Kind], document: Any) -> Kind:
    """A manifest as an object of its kind. Fields have the one spelling that a cluster knows.

    Raises:
        ProblemsError: With every problem at once.
    """
    if not isinstance(document, Mapping):
        raise ProblemsError([Problem("manifest", f"must be an object, is {type(document).__name__}")])
    try:
        return kind.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ProblemsError(list(dict.fromkeys(_problems(error.errors(), kind)))) from error


def _problems(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> Iterator[Problem]:
    """One problem for each error; a required field that is there in another spelling is one, not two."""
    misspelled = {
        _path((*error["loc"][:-1], spelled(str(error["loc"][-1]))))
        for error in errors
        if error["type"] == "extra_forbidden"
    }
    for error in errors:
        if error["type"] == "extra_forbidden":
            yield from _unknown(error, root)
        elif error["type"] != "missing" or _path(error["loc"]) not in misspelled:
            yield _explained(error)


def _explained(error: ErrorDetails) -> Problem:
    path = _path(error["loc"])
    if error["type"] == "missing":
        return Problem(path, "is required; add it")
    message = error["msg"].removeprefix("Value error, ")
    rejected_input = error.get("input")
    if len(repr(rejected_input)) > LONGEST_SHOWN:
        return Problem(path, message)
    suffix = (
        f" (is {rejected_input!r})"
        if isinstance(rejected_input, str | int | float | bool | None) and repr(rejected_input) not in message
        else ""
    )
    return Problem(path, f"{message}{suffix}")


def _unknown(error: ErrorDetails, root: type[BaseModel]) -> Iterator[Problem]:
    """What to write in place of a field that there is not: here, elsewhere, or in words of other frameworks."""
    location = error["loc"]
    path, name = _path(location), str(location[-1])
    right = spelled(name)
    fields = _fields_at(location[:-1], root)
    instead = ELSEWHERE.get(_path((*location[:-1], right)))
    if instead is not None:
        yield Problem(path, instead)
        return
    if right in fields:
        yield Problem(path, f"unknown field; did you mean {right}?")
        return
    names = [part for part in location if isinstance(part, str)]
    meant = [
        Problem(".".join([path, *at[len(names) :]]), f"unknown field; {meaning}")
        for at, word in words_in(names, error.get("input"))
        if (meaning := word.meaning(root.__name__))
    ]
    if meant:
        yield from meant
        return
    yield Problem(path, f"unknown field; {_nearest(right, fields, root)}")


def _nearest(name: str, fields: Sequence[str], root: type[BaseModel]) -> str:
    elsewhere = [path for path in all_fields(root) if path.rpartition(".")[2] == name]
    if 0 < len(elsewhere) <= MOST_PLACES:
        return f"did you mean {' or '.join(elsewhere)}?"
    matches = difflib.get_close_matches(name, fields, n=1)
    return f"did you mean {matches[0]}?" if matches else f"known here: {', '.join(fields)}" if fields else "remove it"


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
        field = next((field for name, field in fields.items() if (field.alias or name) == part), None)
        if field is None:
            return []
        model = _inner_model(field.annotation)
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


@cache
def all_fields(root: type[BaseModel]) -> tuple[str, ...]:
    """Path of every field of a kind of manifest."""
    return tuple(_below(root, ""))


def _below(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        inner_model = _inner_model(field.annotation)
        if inner_model is not None:
            yield from _below(inner_model, f"{path}.")


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """Model inside `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        model = _inner_model(argument)
        if model is not None:
            return model
    return None
