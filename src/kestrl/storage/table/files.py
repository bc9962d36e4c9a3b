"""Files of the table in a run's storage, read by ranges: a query of scalar columns does not transfer the tokens."""

from __future__ import annotations

import io
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from kestrl.errors import StorageError, UserInputError
from kestrl.storage.objects import ObjectStore
from kestrl.storage.stored_groups import EpisodeBatch
from kestrl.storage.table.arrow import arrow, parquet
from kestrl.storage.table.columns import SCHEMA_VERSION, VERSION_KEY
from kestrl.storage.table.encoding import table_of

ROW_GROUP = 128
"""Episodes of a row group, the unit in which rows are read."""
DAMAGED = "episodes_damaged"
"""Failure code of a batch that cannot be read."""


def file_of(batch: EpisodeBatch, run: str) -> bytes:
    """The Parquet file of a batch."""
    sink = arrow().BufferOutputStream()
    parquet().write_table(table_of(batch, run), sink, compression="zstd", row_group_size=ROW_GROUP)
    content: bytes = sink.getvalue().to_pybytes()
    return content


class Ranges(io.RawIOBase):
    """An object as a file that is read by ranges.

    Args:
        store: The storage.
        path: Path of the object.

    Raises:
        StorageError, PlaceError: It is missing, or the store refused.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__()
        self._store, self._path, self._size, self._at = store, path, store.size(path), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size < 0 else min(size, left)
        content = self._store.get_range(self._path, self._at, count) if count else b""
        self._at += len(content)
        return content


class TableFile:
    """One file of the table.

    Args:
        store: The run's storage.
        path: Path of the file.

    Raises:
        StorageError: It is missing (code `not_found`), damaged (code `episodes_damaged`), or the store refused.
        UserInputError: It was written by a later version of KestRL.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._address = store.address(path)
        source = Ranges(store, path)
        with self._damage():
            self._file = parquet().ParquetFile(arrow().PythonFile(source, mode="r"), pre_buffer=True)
            metadata: dict[bytes, bytes] = self._file.schema_arrow.metadata or {}
            version = int(metadata.get(VERSION_KEY, b"0"))
        if version > SCHEMA_VERSION:
            raise UserInputError(
                f"{self._address} was written by a later version of KestRL (schema {version}, known is "
                f"{SCHEMA_VERSION}); update kestrl"
            )

    def read(self, columns: Collection[str] | None = None) -> Any:
        """The Arrow table of all rows, of some columns or of all."""
        with self._damage():
            return self._file.read(columns=None if columns is None else list(columns))

    def rows(self, wanted: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Rows as pyarrow gives them, all or those at ascending places; reads the row groups that hold them."""
        records: list[dict[str, Any]] = []
        begin = 0
        with self._damage():
            if wanted is None:
                records += self._file.read().to_pylist()
                return records
            for number in range(self._file.num_row_groups):
                count = self._file.metadata.row_group(number).num_rows
                places = [place - begin for place in wanted if begin <= place < begin + count]
                if places:
                    records += self._file.read_row_group(number).take(places).to_pylist()
                begin += count
            return records

    @contextmanager
    def _damage(self) -> Generator[None]:
        """Makes an error of pyarrow a typed one that names the file."""
        try:
            yield
        except (arrow().ArrowException, OSError, ValueError) as error:
            raise damaged(self._address, error) from error


def damaged(address: str, error: Exception) -> StorageError:
    """The failure of a stored object that cannot be decoded."""
    return StorageError(f"{address} is damaged: {error}; restore it or remove it", code=DAMAGED)
