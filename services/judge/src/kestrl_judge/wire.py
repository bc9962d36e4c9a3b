"""The wire format of protobuf, read and written without decoding messages.

https://protobuf.dev/programming-guides/encoding: a message is a sequence of fields, each a tag, which has its number
and its type of the wire, and its content.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
"""Types of the wire; messages, texts and bytes are of the third. Groups, 3 and 4, are not of proto3."""
SHIFTS = range(7, 64, 7)
"""Bits before each byte of a number but the first: one without an end is not added up."""


def tag_of(number: int, kind: int = LENGTH_DELIMITED) -> int:
    """The tag of a field."""
    return number << 3 | kind


def wire_fields(encoded: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message in a part of some bytes, in its order: the tag of each, and where it, its content and
    what follows it begin. As protobuf does, compare tags and not numbers: a field of another type is an unknown one.

    Raises:
        DecodeError: It is not in the wire format.
    """
    while start < end:
        tag, begin = read_varint(encoded, start)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            length, begin = read_varint(encoded, begin)
            after = begin + length
        elif kind == VARINT:
            after = read_varint(encoded, begin)[1]
        elif kind in {FIXED64, FIXED32}:
            after = begin + (8 if kind == FIXED64 else 4)
        else:
            raise DecodeError(f"a field of type {kind} of the wire at byte {start}")
        if after > end or tag < 8:
            raise DecodeError(f"a field at byte {start} that does not end in its message, or has no number")
        yield tag, start, begin, after
        start = after


def read_varint(encoded: bytes, start: int) -> tuple[int, int]:
    """A number and the position after it.

    Raises:
        DecodeError: It does not end, or has more than 64 bits.
    """
    try:
        number, position = encoded[start], start + 1
        if number <= 0x7F:
            return number, position
        number &= 0x7F
        for shift in SHIFTS:
            byte = encoded[position]
            number |= (byte & 0x7F) << shift
            position += 1
            if byte <= 0x7F:
                return number, position
    except IndexError:
        raise DecodeError(f"a number at byte {start} that is cut") from None
    raise DecodeError(f"a number at byte {start} of more than 64 bits")


def opening(number: int, length: int) -> bytes:
    """What stands before a message that is a field of another one."""
    return _varint(tag_of(number)) + _varint(length)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
