"""Files of the table in a run's storage, read by ranges: a query of scalar columns does not transfer the tokens."""

from __future__ import annotations

import io
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

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


Span = tuple[int, int]
"""First byte of a range, and the one behind its last."""


class Ranges(io.RawIOBase):
    """An object as a file that is read by ranges. pyarrow must use it in the calling thread alone: one of its own that
    lets go of a Python object while the interpreter ends aborts the process.

    Args:
        store: The storage.
        path: Path of the object.

    Raises:
        StorageError, PlaceError: It is missing, or the store refused.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__()
        self._store, self._path, self.size, self._at = store, path, store.size(path), 0
        self._fetched: dict[Span, bytes] = {}

    @contextmanager
    def fetched(self, spans: Sequence[Span]) -> Generator[None]:
        """Reads ranges at once, and answers from them until it ends."""
        self._fetched = dict(zip(spans, self._store.get_ranges(self._path, spans), strict=True)) if spans else {}
        try:
            yield
        finally:
            self._fetched = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        bytes_left = max(0, self.size - self._at)
        count = bytes_left if size < 0 else min(size, bytes_left)
        content = self._bytes(count) if count else b""
        self._at += len(content)
        return content

    def _bytes(self, count: int) -> bytes:
        content = self._fetched.get((self._at, self._at + count))
        return self._store.get_range(self._path, self._at, count) if content is None else content


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
        self._source = Ranges(store, path)
        with self._damage():
            self._file = parquet().ParquetFile(arrow().PythonFile(self._source, mode="r"), pre_buffer=False)
            metadata: dict[bytes, bytes] = self._file.schema_arrow.metadata or {}
            version = int(metadata.get(VERSION_KEY, b"0"))
        if version > SCHEMA_VERSION:
            raise UserInputError(
                f"{self._address} was written by a later version of KestRL (schema {version}, known is "
                f"{SCHEMA_VERSION}); update kestrl"
            )

    def read(self, columns: Collection[str] | None = None) -> Any:
        """The Arrow table of all rows, of some columns or of all."""
        every = range(self._file.num_row_groups)
        with self._damage(), self._source.fetched(self._spans(every, columns)):
            return self._file.read(columns=None if columns is None else list(columns), use_threads=False)

    def rows(self, wanted: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Rows as pyarrow gives them, all or those at ascending places; reads the row groups that hold them."""
        if wanted is None:
            return cast("list[dict[str, Any]]", self.read().to_pylist())
        records: list[dict[str, Any]] = []
        begin = 0
        for number in range(self._file.num_row_groups):
            count = self._file.metadata.row_group(number).num_rows
            places = [place - begin for place in wanted if begin <= place < begin + count]
            if places:
                records += self._row_group(number).take(places).to_pylist()
            begin += count
        return records

    def _row_group(self, number: int) -> Any:
        with self._damage(), self._source.fetched(self._spans([number], None)):
            return self._file.read_row_group(number, use_threads=False)

    def _spans(self, row_groups: Iterable[int], columns: Collection[str] | None) -> list[Span]:
        """Where the columns of row groups are in the file; not what a damaged footer says, which pyarrow refuses."""
        schema = self._file.schema
        names = [schema.column(place).path.partition(".")[0] for place in range(len(schema))]
        places = [place for place, name in enumerate(names) if columns is None or name in columns]
        spans: list[Span] = []
        for number in row_groups:
            group = self._file.metadata.row_group(number)
            for chunk in map(group.column, places):
                begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                spans.append((begin, begin + chunk.total_compressed_size))
        return [(begin, end) for begin, end in spans if 0 <= begin < end <= self._source.size]

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
