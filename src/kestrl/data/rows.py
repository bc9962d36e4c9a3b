"""Reading rows and turning each into a `Scenario`, or into an error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kestrl.episode import Scenario
from kestrl.errors import UserInputError

MAX_PROBLEMS = 20
"""Problems reported at once; a file of the wrong shape has as many as it has rows."""
Text = Annotated[str, Field(min_length=1)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Annotated[str, Field(pattern="^(system|user)$")]
    content: Text


class _Kwargs(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    create_kwargs: dict[str, Any] = {}
    execute_kwargs: dict[str, Any] = {}


class _PlainRow(BaseModel):
    """`{id, prompt|question, tools?, ground_truth?, metadata?}`; `tools` is a list of names or an object of kwargs by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: Text | int
    prompt: Text | Annotated[list[_Message], Field(min_length=1)] | None = None
    question: Text | None = None
    tools: list[Text] | dict[Text, _Kwargs] | None = None
    ground_truth: Any = None
    metadata: dict[str, Any] = {}


class _RewardModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    style: str = "rule"
    ground_truth: Any


class _ExtraInfo(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    index: int | str | None = None
    need_tools_kwargs: bool = False
    tools_kwargs: dict[str, _Kwargs | None] | None = None


class _VerlRow(BaseModel):
    """verl's form. Its Parquet files fill absent struct members with null, which is why nulls are taken for absent."""

    model_config = ConfigDict(extra="allow", strict=True)
    data_source: Text
    agent_name: str | None = None
    prompt: Annotated[list[_Message], Field(min_length=1)]
    reward_model: _RewardModel
    extra_info: _ExtraInfo = _ExtraInfo()


class _Place(NamedTuple):
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def _problems(place: _Place, error: ValidationError) -> list[str]:
    return [
        f"{place}: {'.'.join(str(part) for part in item['loc']) or 'row'}: {item['msg']}" for item in error.errors()
    ]


def _from_plain(row: _PlainRow, ordinal: int, place: _Place) -> Scenario:
    if (row.prompt is None) == (row.question is None):
        raise UserInputError(f"{place}: prompt: give either `prompt` or `question`, and one of them only")
    asked = row.question if row.question is not None else row.prompt
    messages = (
        [{"role": "user", "content": asked}]
        if isinstance(asked, str)
        else [{"role": item.role, "content": item.content} for item in asked or ()]
    )
    by_name = row.tools if isinstance(row.tools, dict) else {}
    return Scenario(
        id=str(row.id),
        ordinal=ordinal,
        messages=messages,
        tools=None if row.tools is None else list(row.tools),
        tools_kwargs={name: kwargs.model_dump() for name, kwargs in by_name.items()},
        ground_truth=row.ground_truth,
        metadata=row.metadata,
    )


def _from_verl(row: _VerlRow, ordinal: int) -> Scenario:
    given = row.extra_info.tools_kwargs or {}
    kwargs = {name: value.model_dump() for name, value in given.items() if value is not None}
    extra = row.extra_info.model_dump(exclude={"tools_kwargs", "need_tools_kwargs"})
    index = row.extra_info.index
    return Scenario(
        id=f"{row.data_source}/{ordinal if index is None else index}",
        ordinal=ordinal,
        messages=[{"role": item.role, "content": item.content} for item in row.prompt],
        tools_kwargs=kwargs,
        ground_truth=row.reward_model.ground_truth,
        metadata={"data_source": row.data_source, **extra},
    )


def _scenario(raw: Any, ordinal: int, place: _Place) -> Scenario:
    """One row as a scenario. Raises UserInputError with one line a problem."""
    if not isinstance(raw, Mapping):
        raise UserInputError(f"{place}: row: must be an object, is {type(raw).__name__}")
    try:
        if "reward_model" in raw or "data_source" in raw:
            return _from_verl(_VerlRow.model_validate(raw), ordinal)
        return _from_plain(_PlainRow.model_validate(raw), ordinal, place)
    except ValidationError as error:
        raise UserInputError("\n".join(_problems(place, error))) from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives every member of a struct in every row; one that is null was not there."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {key: _without_nulls(item) for key, item in members.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("Sequence[Any]", value)]
    return value


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserInputError(f"{path}: reading Parquet needs pyarrow: pip install 'kestrl[parquet]'") from error
    try:
        rows = cast("list[Any]", parquet.read_table(path).to_pylist())  # pyright: ignore[reportUnknownMemberType] - untyped
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: not readable as Parquet: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield number, _without_nulls(row)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except (ValueError, RecursionError) as error:
                        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
                        raise UserInputError(f"{path}:{number}: not JSON: {why}") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UserInputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix in {".jsonl", ".ndjson"}:
        return _jsonl(path)
    raise UserInputError(f"{path}: a data set is a .jsonl or .parquet file")


def load_scenarios(path: Path, *, size: int | None = None) -> list[Scenario]:
    """Reads a data set; ordinals count from 0 in file order.

    Args:
        path: `.jsonl` (one JSON object a line) or `.parquet`.
        size: Rows used; None uses all.

    Raises:
        UserInputError: The file or a row cannot be used; one line for each problem, up to 20, each naming file, line and field.
    """
    scenarios: list[Scenario] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, raw in _rows(path):
        if size is not None and len(scenarios) >= size:
            break
        try:
            scenario = _scenario(raw, len(scenarios), _Place(path, number))
        except UserInputError as error:
            problems += str(error).splitlines()
            if len(problems) >= MAX_PROBLEMS:
                problems.append("... and perhaps more; mend these first")
                break
            continue
        if scenario.id in seen:
            problems.append(f"{path}:{number}: id: {scenario.id!r} is already the id of line {seen[scenario.id]}")
        seen[scenario.id] = number
        scenarios.append(scenario)
    if problems:
        raise UserInputError("\n".join(problems))
    if not scenarios:
        raise UserInputError(f"{path}: holds no rows")
    if size is not None and len(scenarios) < size:
        raise UserInputError(f"{path}: holds {len(scenarios)} rows, the manifest asks for size {size}")
    return scenarios
