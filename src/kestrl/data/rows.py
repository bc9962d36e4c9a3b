"""Reads data sets: each row becomes a `Scenario`, or an error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from kestrl.data.forms import BadRow, scenario
from kestrl.data.values import columns_as_json, without_nulls
from kestrl.episode import Scenario
from kestrl.errors import UserInputError
from kestrl.tools.shapes import is_mapping

MAX_PROBLEMS = 20
"""Maximum number of reported problems; a file of the wrong shape has one per row."""
ROWS_AT_ONCE = 1024
"""Rows of a Parquet file that are converted to Python values at a time."""


class DataRow(NamedTuple):
    """A valid row."""

    path: Path
    line: int
    """Line of a JSONL file, row of a Parquet file, from 1."""
    scenario: Scenario

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.path}:{self.line}"


def _read_row(path: Path, line: int, raw: object, ordinal: int) -> DataRow:
    """Converts one row; raises BadRow."""
    if not is_mapping(raw):
        raise BadRow([f"row: must be an object, is {type(raw).__name__}"])
    columns, problems = columns_as_json({str(name): value for name, value in raw.items()})
    if problems:
        raise BadRow(problems)
    return DataRow(path, line, scenario(columns, ordinal))


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserInputError(f"{path}: reading Parquet needs pyarrow: pip install 'kestrl[parquet]'") from error
    damaged = cast("type[Exception]", cast(Any, pyarrow).ArrowException)
    number = 1
    try:
        with cast(Any, parquet.ParquetFile(path)) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                names: list[str] = batch.schema.names
                twice = next((name for name in names if names.count(name) > 1), None)
                if twice is not None:
                    raise UserInputError(f"{path}: two columns have the name {twice!r}; rename one of them")
                columns = [_column(path, name, batch.column(name), number) for name in names]
                for values in zip(*columns, strict=True):
                    yield number, without_nulls(dict(zip(names, values, strict=True)))
                    number += 1
    except (OSError, ValueError, damaged) as error:
        raise UserInputError(f"{path}: not readable as Parquet: {error}") from error


def _column(path: Path, name: str, values: Any, first: int) -> list[object]:
    """Values of a column; the error for a value without a Python form names its row."""
    try:
        return cast("list[object]", values.to_pylist(maps_as_pydicts="strict"))
    except (KeyError, ValueError, OverflowError):
        for row, value in enumerate(values, start=first):
            try:
                value.as_py(maps_as_pydicts="strict")
            except (KeyError, ValueError, OverflowError) as error:
                raise UserInputError(f"{path}:{row}: {name}: cannot be read: {error}") from error
        raise


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


def raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file as they are, with their lines.

    Raises:
        UserInputError: It is not a .jsonl or .parquet file, or cannot be read.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix in {".jsonl", ".ndjson"}:
        return _jsonl(path)
    raise UserInputError(f"{path}: a data set is a .jsonl or .parquet file")


def _names_itself(raw: object) -> bool:
    """Whether a row has an `id`."""
    return is_mapping(raw) and raw.get("id") is not None


def read_rows(path: Path, *, size: int | None = None) -> list[DataRow]:
    """Reads a data set; ordinals count from 0 in file order.

    Args:
        path: `.jsonl` (one JSON object a line) or `.parquet`.
        size: Rows used; None uses all.

    Raises:
        UserInputError: The file or a row is invalid; one line for each problem, up to 20, with file, line
            and field.
    """
    rows: list[DataRow] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, raw in raw_rows(path):
        if size is not None and len(rows) >= size:
            break
        try:
            row = _read_row(path, number, raw, len(rows))
        except BadRow as error:
            problems += [f"{path}:{number}: {problem}" for problem in error.problems]
            if len(problems) >= MAX_PROBLEMS:
                problems.append("... and perhaps more; fix these first")
                break
            continue
        id_ = row.scenario.id
        if id_ in seen and not _names_itself(raw):  # verl's `extra_info.index` may repeat
            id_ = f"{id_}#{row.scenario.ordinal}"
            row = row._replace(scenario=replace(row.scenario, id=id_))
        if id_ in seen:
            problems.append(f"{path}:{number}: id: {id_!r} is already the id of line {seen[id_]}")
        seen[id_] = number
        rows.append(row)
    if problems:
        raise UserInputError("\n".join(problems))
    if not rows:
        raise UserInputError(f"{path}: holds no rows")
    if size is not None and len(rows) < size:
        raise UserInputError(f"{path}: holds {len(rows)} rows, the manifest asks for size {size}")
    return rows


def load_scenarios(path: Path, *, size: int | None = None) -> list[Scenario]:
    """The scenarios of a data set, as `read_rows` reads it."""
    return [row.scenario for row in read_rows(path, size=size)]
