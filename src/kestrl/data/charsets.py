"""Character sets that a stranger's text may declare. Python's codecs have others too: punycode takes time quadratic in
the text, and zlib, hex and the like are none of text.
"""

from __future__ import annotations

import codecs

TEXT = frozenset(
    {"utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "ascii"}
    | {f"iso8859-{part}" for part in (*range(1, 12), *range(13, 17))}
    | {f"cp{page}" for page in (437, 850, 852, 855, 858, 866, 874, 932, 949, 950, *range(1250, 1259))}
    | {"koi8-r", "koi8-u", "mac-roman", "mac-cyrillic", "tis-620"}
    | {"shift_jis", "euc_jp", "iso2022_jp", "gb2312", "gbk", "gb18030", "hz", "big5", "big5hkscs", "euc_kr"}
    | {"iso2022_kr", "johab"}
)
"""Names of codecs whose time is linear in the text."""


def charset_of(name: str | None) -> str | None:
    """The codec of a declared character set; None if it is unknown, or none of text."""
    try:
        codec = codecs.lookup((name or "")[:64]).name
    except (LookupError, ValueError):
        return None
    return codec if codec in TEXT else None
