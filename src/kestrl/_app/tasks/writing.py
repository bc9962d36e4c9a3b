"""Writes rows as JSONL or Parquet, atomically."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kestrl.errors import UserInputError

SUFFIXES = (".jsonl", ".parquet")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replaces `path` by a file of these rows: a reader sees all of them or none.

    Raises:
        UserInputError: The name does not end in .jsonl or .parquet, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UserInputError(f"--out: {path} must end in {' or '.join(SUFFIXES)}")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            _parquet(partial, rows)
        else:
            partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserInputError(f"--out: {path} cannot be written: {error.strerror or error}") from error


def _parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserInputError(f"--out: {path}: writing Parquet needs pyarrow: pip install 'kestrl[parquet]'") from error
    table = cast(Any, pyarrow).Table.from_pylist(list(rows))
    cast(Any, parquet).write_table(table, path)
