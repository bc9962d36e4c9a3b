"""`python -m kestrl.data.parquet_reader FILE`: writes the rows of a Parquet file to stdout, within bounds of memory.

Compressed pages, dictionaries, runs and shared prefixes expand without a bound that the file states truly, so that the
kernel bounds the process, and the rows are weighed as they come.
"""

from __future__ import annotations

import pickle
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from kestrl.data.parquet import FRAME, MAX_ROW, MEMORY_BYTES, MessageKind
from kestrl.tools.shapes import is_list, is_mapping

ROWS_AT_ONCE = 256
"""Rows that are converted to Python values at a time."""
READ_BYTES = 1024**2
"""Bytes of a column that are read at a time."""
MAX_ELEMENTS = MAX_ROW // 8
"""Maximum values of a column in `ROWS_AT_ONCE` rows."""
MAX_ROWS, MAX_EXPANSION = 1024**3, 100
"""Maximum memory of all rows: the larger of a number of bytes and a multiple of the file's size."""


class FileRefused(Exception):
    """A file that is not read; the text stands behind its path."""


def weight(value: object) -> int:
    """Bytes of memory of a value and what it holds; shared parts count each time."""
    size = sys.getsizeof(value)
    if is_mapping(value):
        return size + sum(weight(key) + weight(item) for key, item in value.items())
    if is_list(value):
        return size + sum(map(weight, value))
    return size


def rows(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The rows of a file: the number of each, of how many, and its columns.

    Raises:
        Refused: It cannot be read, or a value has no Python form.
    """
    import pyarrow
    from pyarrow import parquet

    damaged = cast("type[Exception]", cast(Any, pyarrow).ArrowException)
    number = 1
    try:
        with cast(Any, parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)) as file:
            count: int = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
                names: list[str] = batch.schema.names
                twice = next((name for name in names if names.count(name) > 1), None)
                if twice is not None:
                    raise FileRefused(f": two columns have the name {twice!r}; rename one of them")
                columns = [_column(name, batch.column(index), number) for index, name in enumerate(names)]
                for values in zip(*columns, strict=True):
                    yield number, count, dict(zip(names, values, strict=True))
                    number += 1
    except MemoryError:
        raise
    except (OSError, ValueError, damaged) as error:
        raise FileRefused(f": not readable as Parquet: {error}") from error


def _elements(array: Any) -> int:
    """Values of an array, and of the lists and structs in it."""
    types: Any = _arrow_types()
    if types.is_struct(array.type):
        return len(array) + sum(map(_elements, array.flatten()))
    if types.is_map(array.type):
        return len(array) + _elements(array.keys) + _elements(array.items)
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return len(array) + _elements(array.flatten())
    return len(array)


def _arrow_types() -> Any:
    from pyarrow import types

    return types


def _column(name: str, values: Any, first: int) -> list[object]:
    """Values of a column; the error for a value without a Python form names its row."""
    if _elements(values) > MAX_ELEMENTS:
        raise FileRefused(
            f":{first}: {name}: the lists of these {len(values)} rows take too much memory: they have more than "
            f"{MAX_ELEMENTS} values"
        )
    try:
        return cast("list[object]", values.to_pylist(maps_as_pydicts="strict"))
    except (KeyError, ValueError, OverflowError):
        for row, value in enumerate(values, start=first):
            try:
                value.as_py(maps_as_pydicts="strict")
            except (KeyError, ValueError, OverflowError) as error:
                raise FileRefused(f":{row}: {name}: cannot be read: {error}") from error
        raise


def write(path: Path, out: BinaryIO) -> None:
    """Writes the rows as messages.

    Raises:
        Refused: As `rows` does, or they are above their bounds.
        MemoryError: They need more than the process may use.
    """
    memory_limit, total = max(MAX_ROWS, MAX_EXPANSION * path.stat().st_size), 0
    for row in rows(path):
        number, size = row[0], weight(row[2])
        total += size
        if size > MAX_ROW:
            raise FileRefused(f":{number}: the row takes more than {MAX_ROW >> 20} MiB of memory")
        if total > memory_limit:
            raise FileRefused(
                f":{number}: the rows up to here take more than {memory_limit >> 20} MiB of memory; divide the file"
            )
        _send(out, MessageKind.ROW, pickle.dumps(row, pickle.HIGHEST_PROTOCOL))


def _send(out: BinaryIO, kind: MessageKind, content: bytes = b"") -> None:
    out.write(FRAME.pack(kind, len(content)) + content)


def main() -> None:
    """Writes the rows of the file that the command names, and how that ended."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    out = sys.stdout.buffer
    try:
        write(Path(sys.argv[1]), out)
        _send(out, MessageKind.END)
    except FileRefused as error:
        _send(out, MessageKind.REFUSED, str(error).encode("utf-8", "backslashreplace"))
    except RecursionError:
        _send(out, MessageKind.REFUSED, b": not readable as Parquet: its columns are nested too deeply")
    except MemoryError:
        _send(out, MessageKind.REFUSED, f": its pages take more than {MEMORY_BYTES >> 20} MiB of memory".encode())
    except OSError as error:
        _send(out, MessageKind.REFUSED, f": cannot be read: {error.strerror}".encode())


if __name__ == "__main__":
    main()
