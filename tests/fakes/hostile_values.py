"""Values that strangers send: models, tools, judges, servers, rows and archives. Every boundary is tried with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def nested(levels: int, inside: Any = 0) -> Any:
    """Lists within lists."""
    value = inside
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


TEXTS: Mapping[str, str] = {
    "empty": "",
    "lone high surrogate": "a\ud83d",
    "lone low surrogate": "\udc80b",
    "surrogates in the wrong order": "\ude00\ud83d",
    "NUL": "a\0b",
    "terminal": "\x1b[2J\x1b]0;title\x07",
    "direction": "\u202eabc\u2066",
    "invisible": "\u200b\u2060\ufeff\U000e0041",
    "not a character": "\ufffe\uffff",
    "line ends": "a\r\nb\u2028c\x85d",
    "format": "%s%n{0}{name!r}",
    "long": "x" * 1_000_000,
    "long emoji": "\U0001f600" * 300_000,
    "digits": "9" * 100_000,
    "quotes": "\"'`\\" * 1_000,
}
NUMBERS: Mapping[str, Any] = {
    "not a number": float("nan"),
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "smallest": 5e-324,
    "largest": 1.7976931348623157e308,
    "beyond float": 10**400,
    "beyond text": 10**5000,
    "minus beyond text": -(10**5000),
    "minus zero": -0.0,
    "true": True,
}
VALUES: Mapping[str, Any] = {
    **TEXTS,
    **NUMBERS,
    "none": None,
    "deep": nested(500),
    "deeper": nested(5_000),
    "deep object": {"a": nested(200, {"b": 1})},
    "cyclic": cyclic(),
    "wide": [0] * 200_000,
    "key that is no text": {"\ud800": 1},
    "long key": {"k" * 1_000_000: 1},
    "many keys": {f"k{number}": number for number in range(100_000)},
    "bytes": b"\xff",
    "set": {1, 2},
    "object": object(),
}
"""Values of Python, as user code may return them."""
DOCUMENTS: Mapping[str, str] = {
    **{name: json.dumps(text) for name, text in TEXTS.items()},
    "deep": "[" * 500 + "]" * 500,
    "deepest that is parsed": "[" * 900 + "]" * 900,
    "deeper": "[" * 100_000 + "]" * 100_000,
    "deep without an end": '{"a":' * 100_000,
    "not a number": "NaN",
    "infinite": "-Infinity",
    "infinite by its exponent": "1e400",
    "digits": "9" * 4_000,
    "more digits": "9" * 1_000_000,
    "twice": '{"a": 1, "a": 2}',
    "no JSON": "{'a': 1}",
    "nothing": "",
    "true": "true",
    "null": "null",
    "surrogate key": '{"\\ud800": 1}',
    "mark": "\ufeff{}",
}
"""Texts that shall be JSON."""


MARKUP_TEXTS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</pre></main><iframe src=javascript:alert(1)>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</title><base href=//evil.test>",
    "<!--",
    "]]>",
    "&lt;script&gt;",
    "\x00\x1b]8;;http://evil.test\x07click",
    "abc\u202ecba\u2066\u2069\u200f",
)  # fmt: skip"""Texts that a page must show as text."""
