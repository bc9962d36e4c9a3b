r"""The answer that a text gives in `\boxed{...}`: reading it, its form for comparison, and ReTool's shaping of the
reward for it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Comparison = Literal["exact", "text", "math"]
Shaping = Literal["none", "tool_bonus", "tool_penalty"]
RIGHT, WRONG = 1.0, -1.0
BONUS, LEAST_LOSS, PENALTY = 0.1, -0.6, 0.4

_BOX = "\\boxed{"
_LONGEST_NUMBER = 1000
"""Maximum characters of an answer that is read as a number."""
_SPACING = re.compile(r"\s+|\\[,;:! ]|~")
_SIZES = re.compile(r"\\(?:left|right)(?![A-Za-z])\.?")
_FRACTION_FORMS = re.compile(r"\\[dt]frac(?![A-Za-z])")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)")
_QUOTIENT = re.compile(
    rf"(?P<sign>[-+]?)(?:\\frac\{{(?P<a>-?{_DIGITS})\}}\{{(?P<b>{_DIGITS})\}}|(?P<c>{_DIGITS})/(?P<d>{_DIGITS}))"
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`; None if there is none, or if the last one is not closed.

    An escaped brace (`\{`) neither opens nor closes.
    """
    begin = text.rfind(_BOX)
    if begin < 0:
        return None
    begin += len(_BOX)
    open_braces, index = 1, begin
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character in "{}":
            open_braces += 1 if character == "{" else -1
            if not open_braces:
                return text[begin:index]
        index += 1
    return None


def canonical(answer: str) -> str:
    r"""Form of an answer that is equal for equal answers: a number as a reduced fraction (`1,000.0` is `1000`, `0.5`
    and `\frac{1}{2}` are `1/2`), and any other as its LaTeX without spacing, `$` and `\left` and `\right`.
    """
    bare = answer.replace("\u2212", "-").replace("{,}", ",")
    bare = _FRACTION_FORMS.sub(r"\\frac", _SIZES.sub("", _SPACING.sub("", bare))).strip("$")
    value = _number(bare) if len(bare) <= _LONGEST_NUMBER else None
    return bare if value is None else str(value)


def _number(bare: str) -> Fraction | None:
    plain = bare.rstrip(".")
    if _DECIMAL.fullmatch(plain):
        return Fraction(plain.replace(",", ""))
    quotient = _QUOTIENT.fullmatch(plain)
    if quotient is None:
        return None
    above, below = (
        int((quotient[braced] or quotient[sloped]).replace(",", "")) for braced, sloped in (("a", "c"), ("b", "d"))
    )
    return Fraction(-above if quotient["sign"] == "-" else above, below) if below else None


def shaped(correct: bool, tool_turns: int, shaping: Shaping) -> float:
    """Reward of an answer.

    Args:
        correct: Whether it is correct: 1, else -1.
        tool_turns: Turns that called a tool.
        shaping: `none`. `tool_bonus` is verl's recipe for ReTool: a wrong answer loses 0.1 less for each turn that
            called a tool, and at least 0.6. `tool_penalty` takes 0.4 off any answer without a call, as CANN's recipe
            does.

    Raises:
        ValueError: There is no such shaping.
    """
    value = RIGHT if correct else WRONG
    if shaping == "none":
        return value
    if shaping == "tool_bonus":
        return value if correct else min(LEAST_LOSS, value + BONUS * tool_turns)
    if shaping == "tool_penalty":
        return value if tool_turns else value - PENALTY
    raise ValueError(f"shaping must be none, tool_bonus or tool_penalty, is {shaping!r}")
