"""Sources of mail: maildir, tar archive of one, mbox, Kaggle's CSV, Hugging Face's Parquet, JSONL.

Each is read once from start to end in a fixed order and in bounded memory. A record has a *place* that is stable over
runs, by which a build knows what it has read before.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kestrl.data.parquet import parquet_rows
from kestrl.data.values import MAX_VALUES, exceeds_values
from kestrl.errors import UserInputError, place_error
from kestrl.tools.shapes import is_mapping
from kestrl_email.mailbox.kind import Kind
from kestrl_email.mailbox.message import MAX_BYTES
from kestrl_email.mailbox.tar_stream import DAMAGED, MAX_EXTENSION, members

Known = Callable[[str], bool]
"""Whether a place has been read by an earlier run."""
MBOX_START = b"From "
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
_NOT_MAIL = re.compile(r"^(\..*|dovecot.*|maildirfolder|maildirsize|subscriptions|courier.*)$")
TOO_LARGE = f"larger than {MAX_BYTES >> 20} MiB"
LONGEST_PLACE = 4096


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
    return read(path, known)


def _printable(name: str) -> str:
    """A file name as text that can be stored: bytes that are not UTF-8 are escaped, and a long one is cut."""
    text = name.encode("utf-8", "backslashreplace").decode()
    if len(text) <= LONGEST_PLACE:
        return text
    return f"{text[:100]}... ({hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"


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
        status = file.lstat()  # a link may lead out of the folder, to a mail that is not to be searched
        if not stat.S_ISREG(status.st_mode):
            return Record(place, None, position, "not a regular file")
        if status.st_size > MAX_BYTES:
            return Record(place, None, position, TOO_LARGE)
        return Record(place, file.read_bytes(), position)
    except OSError as error:
        return Record(place, None, position, f"cannot be read: {error.strerror}")


def tar(path: Path, known: Known) -> Iterator[Record]:
    """Every file in a tar archive, compressed or not, read as a stream.

    Raises:
        UserInputError: The archive cannot be read further.
    """
    try:
        yield from _of_archive(path, known)
    except DAMAGED as error:
        raise UserInputError(
            f"--source: {path} is damaged: {error}; what was read before is kept, replace the file and run again"
        ) from error


def _of_archive(path: Path, known: Known) -> Iterator[Record]:
    with opened(path) as file:
        for number, (member, archive) in enumerate(members(file), 1):
            place = _printable(f"member {number}" if member.oversized else member.name)
            if not (member.isfile() or member.oversized) or _NOT_MAIL.match(member.name.rpartition("/")[2]):
                continue
            if known(place):
                continue
            if member.oversized:
                yield Record(place, None, file.tell(), f"a header larger than {MAX_EXTENSION >> 10} KiB")
            elif member.size > MAX_BYTES:
                yield Record(place, None, file.tell(), TOO_LARGE)
            else:
                content = archive.extractfile(member)
                yield Record(place, content.read() if content else b"", file.tell())


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; one that is larger than a mail may be comes in pieces."""
    return iter(lambda: file.readline(MAX_BYTES + 1), b"")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; of one that is larger than a mail may be, the beginning."""
    within_line = False
    for piece in _pieces(file):
        if not within_line:
            yield piece
        within_line = not piece.endswith(b"\n")


def mbox(path: Path, known: Known) -> Iterator[Record]:
    """Mails of an mbox file, by the offset of their From_ line; quoted `>From ` lines are restored."""
    with opened(path) as file:
        start, content, size, blank = 0, bytearray(), 0, True
        offset = 0
        for line in _pieces(file):
            if line.startswith(MBOX_START) and blank:
                if size:
                    yield from _of_mbox(start, content, size, known)
                start, content, size = offset, bytearray(), 0
            elif size <= MAX_BYTES:
                content += line
                size += len(line)
            blank = line in (b"\n", b"\r\n")
            offset += len(line)
        if size:
            yield from _of_mbox(start, content, size, known)


def _of_mbox(start: int, content: bytearray, size: int, known: Known) -> Iterator[Record]:
    place = f"offset {start}"
    if known(place):
        return
    if size > MAX_BYTES:
        yield Record(place, None, start, TOO_LARGE)
    else:
        yield Record(place, _QUOTED_FROM.sub(rb"\1", bytes(content)), start + size)


class _Rows:
    """Lines of a CSV file for `csv.reader`, which keeps a row until its last quote is closed, whatever its size."""

    def __init__(self, file: BinaryIO) -> None:
        self._pieces = _pieces(file)
        self._size = self._quotes = 0
        self._ended = True

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._count(piece)
        if self._size > MAX_BYTES:
            raise csv.Error(TOO_LARGE)
        return piece.decode("utf-8", "surrogateescape")

    def _count(self, piece: bytes) -> None:
        self._size += len(piece)
        self._quotes += piece.count(b'"')
        self._ended = piece.endswith(b"\n")

    def begin(self) -> None:
        """What comes is a new row."""
        self._size = self._quotes = 0

    def skip(self) -> None:
        """Passes over the rest of a row that is not read."""
        while not self._ended or self._quotes % 2:
            piece = next(self._pieces, None)
            if piece is None:
                return
            self._count(piece)


def kaggle(path: Path, known: Known) -> Iterator[Record]:
    """Rows of Kaggle's Enron CSV: `file`, `message`. Other tables have the columns of JSONL."""
    csv.field_size_limit(MAX_BYTES)
    with opened(path) as file:
        lines = _Rows(file)
        rows = csv.DictReader(lines)
        try:
            names = rows.fieldnames or []
        except csv.Error as error:
            raise UserInputError(f"--source: {path} has no readable line of columns: {error}") from error
        if "message" not in names and "body" not in names:
            raise UserInputError(f"--source: {path} has neither a column message nor body (it has: {_shown(names)})")
        number = 1
        while True:
            number += 1
            lines.begin()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                lines.skip()
                yield Record(f"row {number}", None, file.tell(), f"not valid CSV: {error}")
                continue
            place = _printable(row.get("file") or f"row {number}")
            if not known(place):
                yield Record(place, row, file.tell())


def _shown(names: Sequence[str]) -> str:
    return _printable(", ".join(names))


def parquet(path: Path, known: Known) -> Iterator[Record]:
    """Rows of a Parquet file with the columns of `corbt/enron-emails`."""
    size = path.stat().st_size
    try:
        for row in parquet_rows(path):
            place = f"row {row.number}"
            if not known(place):
                yield Record(place, row.columns, size * min(row.number, row.total) // max(1, row.total))
    except UserInputError as error:
        raise UserInputError(f"--source: {error}") from error


def jsonl(path: Path, known: Known) -> Iterator[Record]:
    """Lines of a JSONL file: `message_id, subject, from, to, cc, bcc, date, body`, or `message` with the whole mail."""
    with opened(path) as file:
        for number, line in enumerate(_lines(file), 1):
            place = f"line {number}"
            if not line.strip() or known(place):
                continue
            if len(line) > MAX_BYTES:
                yield Record(place, None, file.tell(), TOO_LARGE)
                continue
            if exceeds_values(line):
                yield Record(place, None, file.tell(), f"more than {MAX_VALUES} values")
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
