"""A tar archive of strangers, read as a stream in bounded memory.

`tarfile` reads a long name, the headers of a pax archive and the table of a sparse file into memory, whatever their
size: three gigabytes of them are three megabytes of gzip.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_EXTENSION = 1024 * 1024
"""Maximum bytes of one extension header (a long name, attributes), and of all that belong to one member."""
MAX_SKIPPED = 64 * 1024 * 1024
"""Maximum bytes of an extension header that is passed over; a larger one ends the archive."""
XZ_MEMORY = 128 * 1024 * 1024
"""Maximum bytes of memory that xz may take; `xz -9` takes 65 MiB, and a header may ask for 4 GiB."""
PIECE = 1024 * 1024
"""Bytes that are decompressed at once."""
DAMAGED = (
    tarfile.TarError,
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    RecursionError,
    ValueError,
    ArithmeticError,
    LookupError,
)
"""Raised for an archive that cannot be read further, by the decompressors, or of what stands in its headers."""
_EXTENSIONS = frozenset(
    (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
)
_SKIPPED = b"\x7f"
"""A type that `tarfile` does not know, whose data it passes over."""


class Member(tarfile.TarInfo):
    """A member; an extension header that is too large is a member of its own, whose data is not read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):  # zeros are the end; tarfile takes any other damage for it, too
                raise tarfile.ReadError(str(error)) from error
            raise
        if member.size < 0:
            raise tarfile.ReadError("a header with a negative size")
        if member.type in _EXTENSIONS and member.size > MAX_SKIPPED:
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        if member.type in _EXTENSIONS and member.size > MAX_EXTENSION:
            member.type = _SKIPPED
        return member

    @property
    def oversized(self) -> bool:
        return self.type == _SKIPPED


class _Metered(io.RawIOBase):
    """A stream that can be read up to an allowance."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._offset, self._limit = stream, 0, 0

    def allow(self, size: int) -> None:
        """Lets so many more bytes be read from here."""
        self._limit = self._offset + size

    def read(self, size: int = -1) -> bytes:
        if self._offset >= self._limit:
            raise tarfile.ReadError(f"the headers of a member are larger than {MAX_EXTENSION >> 10} KiB")
        data = self._stream.read(size)
        self._offset += len(data)
        return data


class _Xz(io.RawIOBase):
    """The content of .xz and .lzma, of several streams behind one another too, in bounded memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            rest = b""
            if self._decoder.eof:
                rest = self._decoder.unused_data.lstrip(b"\0") or self._file.read(PIECE).lstrip(b"\0")
                if not rest:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif self._decoder.needs_input:
                rest = self._file.read(PIECE)
                if not rest:
                    raise EOFError("the compressed data ends before its end marker")
            data = self._decoder.decompress(rest, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


def members(file: BinaryIO) -> Iterator[tuple[Member, tarfile.TarFile]]:
    """Members of an archive, compressed or not; the data of one can be read from the archive until the next is asked
    for.
    """
    stream = _Metered(_decompressed(file))
    stream.allow(MAX_EXTENSION)
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive:
        kept: Any = archive
        while isinstance(member := archive.next(), Member):
            stream.allow(member.size + 2 * MAX_EXTENSION)
            yield member, archive
            kept.members, kept.pax_headers = [], {}  # tarfile keeps every header, which would not be bounded


def _decompressed(file: BinaryIO) -> Any:
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if start.startswith(b"BZh"):
        return bz2.open(file)
    if start.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        return io.BufferedReader(_Xz(file))
    return file
