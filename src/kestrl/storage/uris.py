"""Conversion between paths and addresses: a `file://` URI is percent-encoded, a path never is."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from kestrl.errors import UserInputError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FILE = re.compile(r"file:(?://(?P<host>[^/]*))?(?P<path>.*)", re.DOTALL)
LOCAL_SCHEMES = frozenset({"", "file"})


def scheme_of(address: str) -> str:
    """The scheme of an address, in lower case; empty for a plain path, whatever characters it holds."""
    if address.startswith("file:"):
        return "file"
    match = _SCHEME.match(address)
    return "" if match is None else match[1].lower()


def is_local(address: str) -> bool:
    """Whether an address is a path or a `file://` URI."""
    return scheme_of(address) in LOCAL_SCHEMES


def local_path(address: str) -> Path:
    """The path that a `file://` URI or a plain path names.

    Raises:
        UserInputError: The URI names a host, as `file://folder/name` does.
    """
    match = _FILE.fullmatch(address)
    if match is None:
        return Path(address)
    if match["host"] not in {None, "", "localhost"}:
        raise UserInputError(f"{address!r} names the host {match['host']!r}; write file:///ABSOLUTE/PATH, or a path")
    return Path(unquote(match["path"]))


def file_uri(path: Path) -> str:
    """The `file://` URI of a path, which is made absolute first."""
    return path.resolve().as_uri()
