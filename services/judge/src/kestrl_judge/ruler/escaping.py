"""JSON encoding of untrusted data for a judge model. Lossless: any JSON parser restores the data.

No delimiter of a prompt and no control token of a model can occur in it: `<`, `>` and `&` are written as escapes, and
so are invisible and look-alike characters and the first letter of bracketed control words such as `[INST]`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

LOOK_ALIKES = frozenset("\uff1c\uff1e\uff5c\u2581\u2039\u203a\u00ab\u00bb\u3008\u3009\u27e8\u27e9\u300a\u300b")
"""Characters that stand for angle brackets, or occur in control tokens of models, such as a full-width bar."""
INVISIBLE = frozenset({"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp"})
"""Unicode categories without a visible form: control and format characters, private use, separators of lines."""
BRACKETED = re.compile(r"\[(?=/?[A-Za-z_]+\])")
"""`[INST]`, `[/INST]`, `[TOOL_CALLS]`: control words of Mistral's templates."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A string in JSON text."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 127 else f"\\u{ord(character):04x}"


def _is_unsafe(character: str) -> bool:
    return (
        character in "<>&\x7f"
        or character in LOOK_ALIKES
        or (ord(character) > 127 and unicodedata.category(character) in INVISIBLE)
        or "\ufe00" <= character <= "\ufe0f"
        or "\U000e0100" <= character <= "\U000e01ef"
    )


def encode(value: Any) -> str:
    """A JSON value as text that cannot end its block, hold a control token or hide a character."""
    text = _encode(value)
    if not text.isascii() or any(mark in text for mark in "<>&\x7f"):
        text = "".join(_escaped(character) if _is_unsafe(character) else character for character in text)
    return STRING.sub(lambda string: BRACKETED.sub(r"\\u005b", string[0]), text) if BRACKETED.search(text) else text


def estimated_tokens(text: str) -> int:
    """Upper estimate of the tokens of a text: three ASCII characters or one other character each."""
    ascii_characters = len(text) if text.isascii() else sum(map(str.isascii, text))
    return len(text) - ascii_characters + -(-ascii_characters // 3)
