"""Mails of any source as plain values: headers decoded, dates in UTC, one text body, damage repaired or reported. Pure.

The standard library's parser reads the mails; what it leaves undecoded (unknown character sets, raw 8-bit headers,
impossible dates, NUL bytes) is handled here, so that every value is text that SQLite and JSON can hold.
"""

from __future__ import annotations

import binascii
import email
import email.utils
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.errors import MessageError
from email.header import decode_header
from email.message import Message
from typing import Any

from kestrl.data.charsets import charset_of
from kestrl.tools.shapes import is_list
from kestrl_email.mailbox.html_text import html_text

MAX_BYTES = 64 * 1024 * 1024
"""Maximum size of one mail with its attachments; larger ones are reported as malformed."""
MAX_HEADERS = 256 * 1024
"""Maximum characters of the headers of a mail together; parsers of addresses and encoded words are quadratic."""
EARLIEST, LATEST = 1970, 2100
"""Years outside of these are a damaged Date header."""
KINDS = ("to", "cc", "bcc")
KNOWN_HEADERS = ("from", "to", "cc", "date", "subject", "message-id", "received")
"""A record without any of these is not a mail."""
UNPARSABLE = (MessageError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Raised by the standard library's parser and decoders on hostile input (nested too deeply, broken parameters)."""

_FOLD = re.compile(r"\r?\n[ \t]*|\r")
_SPACE = re.compile(r"\s+")
_PLAIN_ADDRESSES = re.compile(r"[^\s,;:<>\"'()@]+@[^\s,;:<>\"'()@]+(?:\s*,\s*[^\s,;:<>\"'()@]+@[^\s,;:<>\"'()@]+)*")
_ADDRESS = re.compile(r"(?<![^\s,;:<>\"'()@])[^\s,;:<>\"'()@]++@[^\s,;:<>\"'()@]+")
_ZERO_YEAR = re.compile(r"\b0\d{3}\b")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Lone surrogates that do not stand for a byte, as `\\ud83d` of a cut emoji in JSON."""
_MESSAGE_ID = re.compile(r"<[^<>\s]+>")


class Malformed(ValueError):
    """A record that is not a mail; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMail:
    """One mail."""

    message_id: str
    """Message-ID with its angle brackets; empty if the mail has none."""
    date: str
    """`YYYY-MM-DD HH:MM:SS` in UTC; empty if no header gives a possible date."""
    from_address: str
    """Lower case; empty if unknown."""
    from_name: str
    recipients: tuple[tuple[str, str], ...]
    """Lower-case address and kind (to, cc, bcc), each pair once."""
    subject: str
    body: str
    folder: str = ""
    """X-Folder, as in the Enron corpus."""

    def digest(self, *, with_day: bool) -> bytes:
        """Key by which copies are recognised: sender, subject and text without white space, and the day.

        Args:
            with_day: Whether mails with the same text on different days are different mails.
        """
        parts = (self.from_address, self.subject, "".join(self.body.split()), self.date[:10] if with_day else "")
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def parse(raw: bytes) -> ParsedMail:
    """Parses an RFC 822 mail.

    Raises:
        Malformed: It is empty, too large, has no mail headers, or breaks the parser.
    """
    if len(raw) > MAX_BYTES:
        raise Malformed(f"larger than {MAX_BYTES >> 20} MiB")
    if not raw.strip():
        raise Malformed("empty")
    try:
        return _parsed(email.message_from_bytes(raw.lstrip(b"\r\n")))
    except Malformed:
        raise
    except UNPARSABLE as error:
        raise Malformed(f"cannot be parsed: {type(error).__name__}: {error}"[:200]) from error


def _parsed(message: Message) -> ParsedMail:
    headers: dict[str, list[str]] = {}
    for name, value in message.raw_items():
        headers.setdefault(name.lower(), []).append(str(value))
    _check_size(value for values in headers.values() for value in values)
    if not any(name in headers for name in KNOWN_HEADERS):
        raise Malformed("no mail headers")
    (sender, *_) = [*_addresses(headers.get("from", ())), ("", "")]
    return ParsedMail(
        message_id=_message_id(_first(headers, "message-id")),
        date=_date(headers),
        from_address=sender[1],
        from_name=sender[0],
        recipients=_recipients({kind: _addresses(headers.get(kind, ())) for kind in KINDS}),
        subject=header_text(_first(headers, "subject")),
        body=_body(message),
        folder=header_text(_first(headers, "x-folder")),
    )


def from_fields(fields: Mapping[str, Any]) -> ParsedMail:
    """A mail from columns of Parquet or JSONL: `message_id, subject, from, to, cc, bcc, date, body`, or `message` with
    the RFC 822 text.

    Raises:
        Malformed: A column has the wrong type, or neither sender, subject nor body is there.
    """
    whole = fields.get("message")
    if isinstance(whole, str | bytes):
        return parse(whole if isinstance(whole, bytes) else _bytes_of(whole))
    try:
        return _of_columns(fields)
    except Malformed:
        raise
    except UNPARSABLE as error:
        raise Malformed(f"cannot be parsed: {type(error).__name__}: {error}"[:200]) from error


def _of_columns(fields: Mapping[str, Any]) -> ParsedMail:
    if not any(fields.get(name) for name in ("from", "subject", "body")):
        raise Malformed("none of the columns from, subject and body has a value")
    single = [_string(fields, name) for name in ("message_id", "from", "subject")]
    _check_size((*single, *(value for kind in KINDS for value in _strings(fields, kind))))
    (sender, *_) = [*_addresses([_string(fields, "from")]), ("", "")]
    return ParsedMail(
        message_id=_message_id(_string(fields, "message_id")),
        date=_field_date(fields.get("date")),
        from_address=sender[1],
        from_name=sender[0],
        recipients=_recipients({kind: _addresses(_strings(fields, kind)) for kind in KINDS}),
        subject=header_text(_string(fields, "subject")),
        body=_clean_body(_string(fields, "body")),
    )


def _string(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Malformed(f"{name} is {type(value).__name__}, not text")
    return value


def _strings(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name)
    if value is None:
        return []
    values: Any = [value] if isinstance(value, str) else value
    if not is_list(values) or not all(isinstance(item, str) for item in values):
        raise Malformed(f"{name} is neither text nor a list of texts")
    return [str(item) for item in values]


def _check_size(headers: Iterable[str]) -> None:
    if sum(map(len, headers)) > MAX_HEADERS:
        raise Malformed(f"headers larger than {MAX_HEADERS >> 10} KiB")


def _bytes_of(text: str) -> bytes:
    """The bytes of a text that was read with `surrogateescape`."""
    return _NO_BYTE.sub("?", text).encode("utf-8", "surrogateescape")


def _first(headers: Mapping[str, Sequence[str]], name: str) -> str:
    return headers[name][0] if name in headers else ""


def storable(text: str) -> str:
    """Text without NUL bytes and lone surrogates, which SQLite and UTF-8 cannot hold."""
    return _UNSTORABLE.sub("", text) if _UNSTORABLE.search(text) else text


def decoded(raw: bytes, charset: str | None = None) -> str:
    """Bytes as text: by their declared character set, else as UTF-8, else as Windows-1252 with replacements."""
    for name in (charset_of(charset), "utf-8"):
        if name:
            try:
                return raw.decode(name)
            except (LookupError, UnicodeError, ValueError):  # unknown, not a text encoding, or not true
                continue
    return raw.decode("cp1252", "replace")


def header_text(value: str) -> str:
    """A header as one line of text: unfolded, RFC 2047 words decoded, raw 8-bit bytes decoded."""
    value = _FOLD.sub(" ", value)
    if not value.isascii():
        value = decoded(_bytes_of(value))
    if "=?" in value:
        try:
            pieces = decode_header(value)
        except (binascii.Error, MessageError, ValueError):
            pieces = [(value, None)]
        value = "".join(text if isinstance(text, str) else decoded(text, charset) for text, charset in pieces)
    return storable(_SPACE.sub(" ", value)).strip()


def _addresses(values: Iterable[str]) -> list[tuple[str, str]]:
    """Name and lower-case address of every mailbox in address headers; entries without an @ are left out."""
    name_and_address: list[tuple[str, str]] = []
    for value in values:
        bare = _FOLD.sub(" ", value).strip()
        if not bare:
            continue
        if _PLAIN_ADDRESSES.fullmatch(bare):
            pairs = [("", item.strip()) for item in bare.split(",")]
        else:
            text = header_text(value)
            pairs = email.utils.getaddresses([text])
            if not any("@" in address for _, address in pairs):  # newer versions give nothing for a malformed list
                pairs = [("", address) for address in _ADDRESS.findall(text)]
        for name, address in pairs:
            clean = storable(address).strip(" '\"<>").lower()
            if "@" in clean:
                name_and_address.append((storable(name).strip(" '\""), clean))
    return name_and_address


def _recipients(by_kind: Mapping[str, list[tuple[str, str]]]) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((address, kind) for kind in KINDS for _, address in by_kind[kind]))


def _message_id(value: str) -> str:
    clean = storable(_FOLD.sub("", value)).strip()
    match = _MESSAGE_ID.search(clean)
    if match:
        return match[0]
    return f"<{clean}>" if clean and " " not in clean else ""


def _date(headers: Mapping[str, Sequence[str]]) -> str:
    """Date header, else the time at the end of a Received header."""
    candidates = [*headers.get("date", ()), *(value.rpartition(";")[2] for value in headers.get("received", ()))]
    return next((date for date in map(_utc, candidates) if date), "")


def _utc(value: str) -> str:
    """A date of a header as `YYYY-MM-DD HH:MM:SS` in UTC; empty if it is not a possible date."""
    clean = _FOLD.sub(" ", value).strip()
    if not clean.isascii() or _ZERO_YEAR.search(clean[:20]):  # year 0001, which the parser takes for 2001
        return ""
    try:
        fields = email.utils.parsedate_tz(clean)
        if fields is None:
            return _storable_time(datetime.fromisoformat(clean))
        moment = datetime(*fields[:6], tzinfo=UTC)  # type: ignore[misc] - six numbers
        return _storable_time(moment - timedelta(seconds=fields[9] or 0))
    except (ValueError, OverflowError, TypeError, IndexError):
        return ""


def _storable_time(moment: datetime) -> str:
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if EARLIEST <= moment.year < LATEST else ""


def _field_date(value: object) -> str:
    if isinstance(value, datetime):
        return _storable_time(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return _storable_time(datetime.fromtimestamp(value, UTC))
        except (ValueError, OverflowError, OSError):
            return ""
    return _utc(value) if isinstance(value, str) else ""


def _body(message: Message) -> str:
    """Text of a mail: its plain-text parts, else its HTML parts as text. Attachments are left out."""
    plain: list[str] = []
    html: list[str] = []
    for part in _leaves(message):
        kind = part.get_content_type()
        if kind in ("text/plain", "text/html") and part.get_content_disposition() != "attachment":
            payload = part.get_payload(decode=True)
            text = decoded(payload if isinstance(payload, bytes) else b"", part.get_content_charset())
            (plain if kind == "text/plain" else html).append(text)
    return _clean_body("\n\n".join(plain) if any(map(str.strip, plain)) else "\n\n".join(map(html_text, html)))


def _leaves(message: Message) -> Iterator[Message]:
    """Parts without parts of their own."""
    return (part for part in message.walk() if not part.is_multipart())


def _clean_body(text: str) -> str:
    return storable(text.replace("\r\n", "\n").replace("\r", "\n")).strip()
