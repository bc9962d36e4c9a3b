"""Sources of mail: maildir, tar archive of one, mbox, Kaggle's CSV, Hugging Face's Parquet, JSONL.

Each is read once from start to end in a fixed order and in bounded memory. A record has a *place* that is stable over
runs, by which a build knows what it has read before.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from kestrl.errors import UserInputError, place_error
from kestrl.tools.shapes import is_mapping
from kestrl_email.mailbox.message import MAX_BYTES

Known = Callable[[str], bool]
"""Whether a place has been read by an earlier run."""
ROWS_AT_ONCE = 512
MBOX_START = b"From "
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
_NOT_MAIL = re.compile(r"^(\..*|dovecot.*|maildirfolder|maildirsize|subscriptions|courier.*)$")
DAMAGED = (tarfile.ReadError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class Kind(StrEnum):
    """Formats of sources."""

    MAILDIR = "maildir"
    TAR = "tar"
    MBOX = "mbox"
    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a source."""

    place: str
    """File, line or offset in the source."""
    content: bytes | Mapping[str, Any] | None
    """RFC 822 bytes, or columns; None if it could not be read."""
    position: int
    """Bytes of the source read so far; files for a maildir."""
    problem: str = ""
    """Why it could not be read."""


def kind_of(path: Path) -> Kind:
    """Format of a source by its name, or its first bytes.

    Raises:
        UserInputError: It does not exist, or its format is not recognised.
    """
    if path.is_dir():
        return Kind.MAILDIR
    if not path.exists():
        raise UserInputError(f"--source: {path} does not exist")
    name = path.name.lower()
    if re.search(r"\.(tar|tar\.(gz|bz2|xz)|tgz|tbz2|txz)$", name):
        return Kind.TAR
    for kind in (Kind.MBOX, Kind.CSV, Kind.PARQUET, Kind.JSONL):
        if name.endswith(f".{kind}"):
            return kind
    with opened(path) as file:
        if file.read(len(MBOX_START)) == MBOX_START:
            return Kind.MBOX
    raise UserInputError(f"--source: {path} has no known format; name it with --format ({', '.join(Kind)})")


def opened(path: Path) -> BinaryIO:
    """The file, opened for reading.

    Raises:
        UserInputError: It cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise place_error(error, str(path)) or UserInputError(f"--source: {path}: {error.strerror}") from error


def total_of(path: Path, kind: Kind) -> int | None:
    """Size of a source in the unit of `Record.position`; None for a maildir, which is not counted first."""
    return None if kind is Kind.MAILDIR else path.stat().st_size


def records(path: Path, kind: Kind, known: Known) -> Iterator[Record]:
    """Records of a source that are not known, in a fixed order.

    Raises:
        UserInputError: The source cannot be read, or is damaged.
    """
    read = {
        Kind.MAILDIR: maildir,
        Kind.TAR: tar,
        Kind.MBOX: mbox,
        Kind.CSV: kaggle,
        Kind.PARQUET: parquet,
        Kind.JSONL: jsonl,
    }[kind]
    try:
        yield from read(path, known)
    except DAMAGED as error:
        raise UserInputError(
            f"--source: {path} is damaged: {error}; what was read before is kept, replace the file and run again"
        ) from error


def _printable(name: str) -> str:
    """A file name as text that can be stored: bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def maildir(folder: Path, known: Known) -> Iterator[Record]:
    """Every file below a folder, which may be a maildir, a tree of them, or Enron's folders of numbered files."""
    count = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        if "cur" in folders and "tmp" in folders:
            folders.remove("tmp")  # mails that are not delivered yet
        for name in sorted(names):
            if _NOT_MAIL.match(name):
                continue
            count += 1
            file = Path(root) / name
            place = _printable(file.relative_to(folder).as_posix())
            if known(place):
                continue
            yield _of_file(file, place, count)


def _of_file(file: Path, place: str, position: int) -> Record:
    try:
        found = file.lstat()  # a link may lead out of the folder, to a mail that is not to be searched
        if not stat.S_ISREG(found.st_mode):
            return Record(place, None, position, "not a regular file")
        if found.st_size > MAX_BYTES:
            return Record(place, None, position, f"larger than {MAX_BYTES >> 20} MiB")
        return Record(place, file.read_bytes(), position)
    except OSError as error:
        return Record(place, None, position, f"cannot be read: {error.strerror}")


def tar(path: Path, known: Known) -> Iterator[Record]:
    """Every file in a tar archive, compressed or not, read as a stream."""
    with opened(path) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined] - tarfile keeps every header, which would not be bounded
            if not member.isfile() or _NOT_MAIL.match(member.name.rpartition("/")[2]):
                continue
            place = _printable(member.name)
            if known(place):
                continue
            if member.size > MAX_BYTES:
                yield Record(place, None, file.tell(), f"larger than {MAX_BYTES >> 20} MiB")
                continue
            content = archive.extractfile(member)
            yield Record(place, content.read() if content else b"", file.tell())


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; one that is larger than a mail may be comes in pieces."""
    return iter(lambda: file.readline(MAX_BYTES + 1), b"")


def mbox(path: Path, known: Known) -> Iterator[Record]:
    """Mails of an mbox file, by the offset of their From_ line; quoted `>From ` lines are restored."""
    with opened(path) as file:
        start, lines, size, blank = 0, list[bytes](), 0, True
        offset = 0
        for line in _lines(file):
            if line.startswith(MBOX_START) and blank:
                if lines:
                    yield from _of_mbox(start, lines, size, known)
                start, lines, size = offset, [], 0
            elif size <= MAX_BYTES:
                lines.append(line)
                size += len(line)
            blank = line in (b"\n", b"\r\n")
            offset += len(line)
        if lines:
            yield from _of_mbox(start, lines, size, known)


def _of_mbox(start: int, lines: list[bytes], size: int, known: Known) -> Iterator[Record]:
    place = f"offset {start}"
    if known(place):
        return
    if size > MAX_BYTES:
        yield Record(place, None, start, f"larger than {MAX_BYTES >> 20} MiB")
    else:
        yield Record(place, _QUOTED_FROM.sub(rb"\1", b"".join(lines)), start + size)


def kaggle(path: Path, known: Known) -> Iterator[Record]:
    """Rows of Kaggle's Enron CSV: `file`, `message`. Other tables have the columns of JSONL."""
    csv.field_size_limit(MAX_BYTES)
    with opened(path) as raw, io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="") as text:
        rows = csv.DictReader(iter(text.readline, ""))
        names = rows.fieldnames or []
        if "message" not in names and "body" not in names:
            raise UserInputError(f"--source: {path} has neither a column message nor body (it has: {', '.join(names)})")
        number = 1
        while True:
            number += 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Record(f"row {number}", None, raw.tell(), f"not valid CSV: {error}")
                continue
            place = row.get("file") or f"row {number}"
            if not known(place):
                yield Record(place, row, raw.tell())


def parquet(path: Path, known: Known) -> Iterator[Record]:
    """Rows of a Parquet file with the columns of `corbt/enron-emails`."""
    try:
        import pyarrow
        from pyarrow import parquet as format_
    except ImportError as error:
        raise UserInputError(f"--source: reading {path} needs pyarrow: pip install 'kestrl[parquet]'") from error
    library: Any = pyarrow  # without type stubs
    size, number = path.stat().st_size, 0
    with opened(path) as raw:
        try:
            file: Any = format_.ParquetFile(raw)
            count = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    place = f"row {number}"
                    if not known(place):
                        yield Record(place, row, size * number // count)
        except library.ArrowException as error:
            raise UserInputError(f"--source: {path} is not a readable Parquet file: {error}") from error


def jsonl(path: Path, known: Known) -> Iterator[Record]:
    """Lines of a JSONL file: `message_id, subject, from, to, cc, bcc, date, body`, or `message` with the whole mail."""
    with opened(path) as file:
        for number, line in enumerate(_lines(file), 1):
            place = f"line {number}"
            if not line.strip() or known(place):
                continue
            if len(line) > MAX_BYTES:
                yield Record(place, None, file.tell(), f"larger than {MAX_BYTES >> 20} MiB")
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Record(place, None, file.tell(), f"not valid JSON: {error}"[:200])
                continue
            if is_mapping(row):
                yield Record(place, row, file.tell())
            else:
                yield Record(place, None, file.tell(), f"a {type(row).__name__}, not an object")
