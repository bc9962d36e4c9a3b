"""Reads data sets: each row becomes a `Scenario`, or an error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kestrl.data.forms import BadRow, scenario
from kestrl.data.parquet import parquet_rows
from kestrl.data.row_loops import check_loops
from kestrl.data.values import MAX_VALUES, columns_as_json, exceeds_values, without_nulls
from kestrl.episode import Scenario
from kestrl.errors import SeveralProblems, UserInputError
from kestrl.tools.shapes import is_mapping

MAX_PROBLEMS = 20
"""Maximum number of reported problems; a file of the wrong shape has one per row."""
MAX_LINE = 16 * 1024**2
"""Maximum characters of a line."""


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


def _read_row(path: Path, line: int, raw: object, ordinal: int, *, promptless: bool) -> DataRow:
    """Converts one row; raises BadRow."""
    if not is_mapping(raw):
        raise BadRow([f"row: must be an object, is {type(raw).__name__}"])
    columns, problems = columns_as_json({str(name): value for name, value in raw.items()})
    if problems:
        raise BadRow(problems)
    return DataRow(path, line, scenario(columns, ordinal, promptless=promptless))


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    for row in parquet_rows(path):
        yield row.number, without_nulls(row.columns)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file with one JSON value a line, and their lines.

    Raises:
        UserInputError: It cannot be read, or a line is not JSON or above its bounds.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), start=1):
                if line.strip():
                    yield number, _json(path, number, line)
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UserInputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _json(path: Path, number: int, line: str) -> Any:
    """The value of a line, which is measured before it is parsed."""
    if len(line) > MAX_LINE:
        raise UserInputError(f"{path}:{number}: the line is longer than {MAX_LINE} characters")
    if exceeds_values(line.encode()):
        raise UserInputError(f"{path}:{number}: the line has more than {MAX_VALUES} values")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserInputError(f"{path}:{number}: not JSON: {reason}") from error


def raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file as they are, with their lines.

    Raises:
        UserInputError: It is not a .jsonl or .parquet file, or cannot be read.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix in {".jsonl", ".ndjson"}:
        return json_lines(path)
    raise UserInputError(f"{path}: a data set is a .jsonl or .parquet file")


def _names_itself(raw: object) -> bool:
    """Whether a row has an `id`."""
    return is_mapping(raw) and raw.get("id") is not None


def read_rows(path: Path, *, size: int | None = None, promptless: bool = False) -> list[DataRow]:
    """Reads a data set; ordinals count from 0 in file order.

    Args:
        path: `.jsonl` (one JSON object a line) or `.parquet`.
        size: Rows used; None uses all.
        promptless: Whether rows may have no prompt, since the environment gives it.

    Raises:
        UserInputError: The file or a row is invalid; one line for each problem, up to 20, with file, line
            and field.
    """
    rows: list[DataRow] = []
    problems: list[str] = []
    lines_by_id: dict[str, int] = {}
    for number, raw in raw_rows(path):
        if size is not None and len(rows) >= size:
            break
        try:
            row = _read_row(path, number, raw, len(rows), promptless=promptless)
        except BadRow as error:
            problems += [f"{path}:{number}: {problem}" for problem in error.problems]
            if len(problems) >= MAX_PROBLEMS:
                problems.append("... and perhaps more; fix these first")
                break
            continue
        id_ = row.scenario.id
        if id_ in lines_by_id and not _names_itself(raw):  # verl's `extra_info.index` may repeat
            id_ = f"{id_}#{row.scenario.ordinal}"
            row = row._replace(scenario=replace(row.scenario, id=id_))
        if id_ in lines_by_id:
            problems.append(f"{path}:{number}: id: {id_!r} is already the id of line {lines_by_id[id_]}")
        lines_by_id[id_] = number
        rows.append(row)
    if problems:
        raise SeveralProblems(problems)
    if not rows:
        raise UserInputError(f"{path}: holds no rows")
    if size is not None and len(rows) < size:
        raise UserInputError(f"{path}: holds {len(rows)} rows, the manifest asks for size {size}")
    return rows


def load_scenarios(
    path: Path,
    *,
    size: int | None = None,
    promptless: bool = False,
    runner: str | None = None,
    loops: Collection[str] = (),
) -> list[Scenario]:
    """The scenarios of a data set, as `read_rows` reads it.

    Args:
        path: `.jsonl` or `.parquet`.
        size: Rows used; None uses all.
        promptless: Whether rows may have no prompt.
        runner: The manifest's field that runs the episodes where no loop of the worker does, such as `agent.run`.
        loops: Names in `agent.loops`, which rows may choose beside it.

    Raises:
        UserInputError: The file or a row is invalid, or rows name another loop beside a `runner`.
    """
    rows = read_rows(path, size=size, promptless=promptless)
    if runner is not None:
        check_loops(rows, runner=runner, loops=loops)
    return [row.scenario for row in rows]
