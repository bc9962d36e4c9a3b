"""Makes text of models, tools and users safe to print on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1: start of escape sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional overrides reorder what is read
    "\ud800-\udfff]"  # lone surrogates cannot be encoded
)


def safe(text: str) -> str:
    """Text with control characters written as visible escapes."""
    return _CONTROL.sub(_written_out, text)


def safe_line(text: str) -> str:
    """The same for a single line: newlines are escaped too."""
    return safe(text).replace("\n", "\\n")


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
