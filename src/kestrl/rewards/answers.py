"""Reading an answer out of an episode and comparing it with the expected one, as text and as a number."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any

from kestrl.episode import CallOutcome, Episode, Json, StopReason
from kestrl.rewards.boxed import canonical
from kestrl.tools.shapes import is_list, is_mapping

MAX_READ = 4000
"""Maximum characters, from the end, that are searched for an answer."""

_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_MARKED = re.compile(
    r"####\s*(?P<hashes>[^\n]+)|\\boxed\{(?P<boxed>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    r"|\banswer(?:\s+is)?\s*[:=]\s*(?P<said>[^\n]+)",
    re.IGNORECASE,
)
# An underscore before a number is Markdown's, as in _42_, unless it is part of a name, as in x_42.
_NUMBER = re.compile(
    r"(?<![^\W_])(?<![^\W_]_)(?<!\.)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?!\d)"
)
_EDGES = " \t\r\n.,;:!?\"'`*_()[]{}$%"


def answer_of(episode: Episode) -> str:
    """Answer of an episode: the `answer` argument of the tool that ended it, else the last turn without reasoning."""
    if episode.stop_reason is StopReason.FINAL_TOOL:
        for call in reversed(episode.tool_calls):
            if call.outcome is CallOutcome.OK and call.arguments and "answer" in call.arguments:
                return _text(call.arguments["answer"])
    return _CALL.sub("", _REASONING.sub("", episode.final_text)).strip()


def accepted_answers(ground_truth: Json) -> list[str]:
    """Accepted answers: the ground truth is a text, a number, a list of these, or an object with `answer`.

    Raises:
        ValueError: The ground truth is missing or empty.
    """
    expected: Any = ground_truth
    if is_mapping(expected):
        expected = expected.get("answer")
    answers = [_text(option) for option in (expected if is_list(expected) else [expected]) if option is not None]
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError("the row has no ground_truth to compare with")
    return answers


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def normalised(text: str) -> str:
    """Text without differences in case, width and spacing, and without punctuation at its edges."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().strip(_EDGES).split())


def marked(text: str) -> str | None:
    r"""Text after the last answer marker: `#### 72`, `\boxed{72}`, `Answer: 72`."""
    marks = [match for match in _MARKED.finditer(text[-MAX_READ:]) if match.group(match.lastgroup or 0).strip()]
    return marks[-1].group(marks[-1].lastgroup or 0).strip() if marks else None


def number(text: str) -> Decimal | None:
    """The text as a number, with or without thousands separators; None for other texts."""
    bare = text.strip(_EDGES.replace(".", "")).rstrip(".").replace("\u2212", "-")
    return _decimal(bare) if _NUMBER.fullmatch(bare) else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text."""
    texts = [match.group() for match in _NUMBER.finditer(text[-MAX_READ:].replace("\u2212", "-")) if match.group()]
    numbers = [value for value in map(_decimal, texts) if value is not None]
    return numbers[-1] if numbers else None


def parsed_answer(text: str) -> str:
    """The part of an answer that is compared with a number: the marked answer, or else the last number; empty if there
    is none.
    """
    candidate = marked(text)
    value = last_number(text if candidate is None else candidate)
    return "" if value is None else f"{value:f}"


def matches(answer: str, expected: str) -> bool:
    r"""Whether an answer is the expected one. A number is compared as a number with the marked answer (`#### 72`,
    `\boxed{72}`), or else with the last number of the text; any other answer as text.
    """
    expected = _final(expected)
    expected_number = number(expected)
    candidate = marked(answer)
    if expected_number is not None:
        return expected_number == last_number(answer if candidate is None else candidate)
    return normalised(expected) in (normalised(answer), normalised(candidate or ""))


def compared_part(answer: str, expected: str) -> str:
    """The part of an answer that `matches` compares with the expected one, the same text for equal answers; empty if
    there is none.
    """
    if number(_final(expected)) is None:
        return normalised(marked(answer) or answer)
    return canonical(parsed_answer(answer))


def _final(expected: str) -> str:
    """An expected answer without the worked solution before it."""
    return (marked(expected) or expected) if "####" in expected else expected


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
