"""Text of an HTML document in linear time, also of one that is cut or hostile. Pure.

Only tokens are read. `html.parser` scans the rest of a document again for each construct without an end, and parsers
that build a tree compare each closing tag with all open ones: both are quadratic, hours for a mail of some megabytes.
"""

from __future__ import annotations

import re
from html import unescape

_MARKUP = re.compile(
    r"""
    <!--.*?(?:-->|\Z)
  | <[!?][^>]*+(?:>|\Z)
  | </(?![a-z])[^>]*+(?:>|\Z)
  | <(?P<raw>script|style)(?=[\s/>]).*?(?:</(?P=raw)\s*+>|\Z)
  | <(?P<tag>/?[a-z][^\s/>]*+)
    (?:[^>=]++|=\s*+"[^"]*+(?:"|\Z)|=\s*+'[^']*+(?:'|\Z)|=)*+
    (?:>|\Z)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""Everything that is no text. Each form also ends with the document, so that no character is scanned by two of them."""
_SPACE = re.compile(r"\s+")
_HUGE_REFERENCE = re.compile(r"&#(?:[0-9]{8,}+|x[0-9a-f]{7,}+);?", re.IGNORECASE)
"""Numbers of no character; `unescape` fails on those of thousands of digits."""
_BLOCKS = frozenset({"p", "div", "br", "tr", "li", "h1", "h2", "h3", "h4", "table", "blockquote", "hr"})
_HIDDEN = frozenset({"head", "title"})


def html_text(html: str) -> str:
    """Text of an HTML document, with a line for each block; scripts, styles and the head are left out."""
    pieces: list[str] = []
    hidden = end = 0
    for markup in _MARKUP.finditer(html):
        if not hidden:
            pieces.append(_characters(html[end : markup.start()]))
        end = markup.end()
        tag = (markup["tag"] or "").lower()
        if tag in _HIDDEN:
            hidden += 1
        elif tag.removeprefix("/") in _HIDDEN:
            hidden = max(0, hidden - 1)
        elif tag == "body":
            hidden = 0
        elif tag in _BLOCKS:
            pieces.append("\n")
    if not hidden:
        pieces.append(_characters(html[end:]))
    lines = (line.strip() for line in "".join(pieces).splitlines())
    return "\n".join(line for line in lines if line)


def _characters(text: str) -> str:
    return _SPACE.sub(" ", unescape(_HUGE_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", text)))
