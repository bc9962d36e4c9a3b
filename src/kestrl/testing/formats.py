"""Conformance suite of tool-call formats, for a user's test: `check_format(MyFormat())`.

It writes calls and reads them again, truncates and damages them, and raises `AssertionError` for violated properties.
The texts are determined by the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn
from kestrl.formats.registry import MEMBERS

SCHEMAS: Schemas = {
    "search": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "limit": {"type": "integer"},
            "share": {"type": "number"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
}
"""Schemas of the tools in the suite."""
ARGUMENTS: Sequence[Mapping[str, Any]] = (
    {"word": "kestrel"},
    {"word": "", "limit": 0},
    {"word": "two words, \"quoted\" and 'quoted'", "limit": -12, "exact": True},
    {"word": "line\nbreak\tand tab", "share": 0.25, "exact": False},
    {"word": "é 鳥 \U0001f985", "tags": ["a", "b c", ""], "where": {"deep": {"list": [1, 2.5, None, True]}}},
    {"word": "a < b && c > d; {x: [1]} \\ end", "note": None},
    {"word": "12", "note": "true"},
)


PLACE = "place-of-a-value"
HOSTILE: Sequence[str] = (
    '"\\ud800"',
    "[" * 500 + "]" * 500,
    '{"a":' * 500 + "1" + "}" * 500,
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
)
"""Values with which no call can be sent: a lone surrogate, deep nesting, numbers without a JSON form."""


def check_format(format: ToolCallFormat, *, seed: int = 0, damaged: int = 300) -> None:  # noqa: A002 - the domain's own word
    """Checks a format.

    Args:
        format: The format.
        seed: Seed of the damage to texts.
        damaged: Number of damaged texts.

    Raises:
        AssertionError: A property does not hold; the message has the text.
    """
    missing_members = [member for member in MEMBERS if not hasattr(format, member)]
    assert not missing_members, f"{format!r} has no {', '.join(missing_members)}"
    assert format.example, "the example is empty: the model is shown it when a call cannot be read"
    for arguments in ARGUMENTS:
        _check_calls(format, [("search", arguments)])
    _check_calls(format, [("get_time", {})])
    several: list[tuple[str, dict[str, Any]]] = [
        ("search", {"word": "a"}),
        ("get_time", {}),
        ("search", {"word": "b", "limit": 2}),
    ]
    if _written(format, several) is not None:
        _check_calls(format, several)
    _check_answers(format)
    _check_hostile(format)
    _check_damage(format, random.Random(seed), damaged)  # noqa: S311 - chance for tests


def pieces_of(format: ToolCallFormat, text: str) -> list[str]:  # noqa: A002
    """Pieces of a text, if every marker is a control token."""
    markers = sorted(format.markers, key=len, reverse=True)
    if not markers:
        return [text] if text else []
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return [Marker(piece) if index % 2 else piece for index, piece in enumerate(parts) if piece]


def _written(format: ToolCallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:  # noqa: A002
    """Text of the calls; None if the format cannot represent them."""
    try:
        return format.write(calls)
    except ValueError:
        return None


def _read(format: ToolCallFormat, text: str, *, cut: bool) -> Turn:  # noqa: A002
    pieces = pieces_of(format, text)
    try:
        readable = format.readable(pieces)
        turn = format.read(pieces, SCHEMAS, cut=cut)
    except Exception as error:
        raise AssertionError(f"{format.name} raised {type(error).__name__}: {error} for {text!r}") from error
    assert readable is None or isinstance(readable, str), f"{format.name}: readable returned {readable!r} for {text!r}"  # pyright: ignore[reportUnnecessaryIsInstance] - a user's format
    return turn


def _check_calls(format: ToolCallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:  # noqa: A002
    text = _written(format, calls)
    if text is None:
        assert len(calls) > 1, f"{format.name}: write refuses one call, {calls[0]!r}"
        return
    read_calls = _read(format, text, cut=False).calls
    read_fields = [(call.name, call.arguments, call.problem, call.unfinished) for call in read_calls]
    assert read_fields == [(name, arguments, "", False) for name, arguments in calls], (
        f"{format.name}: wrote {text!r} for {calls!r} and read {read_fields!r}"
    )
    for end in range(len(text)):
        for call in _read(format, text[:end], cut=True).calls:
            whole = call.arguments is not None and not call.problem and not call.unfinished
            assert not whole or (call.name, call.arguments) in [
                (name, dict(call_arguments)) for name, call_arguments in calls
            ], f"{format.name}: cut at {end}, {text!r} is read as the call {call!r}, which was not written"


def _check_answers(format: ToolCallFormat) -> None:  # noqa: A002
    for text in ("", "A small falcon.", 'The answer is {"value": 4}.', "[1, 2, 3]", "f(x) = x + 1", "a < b"):
        turn = _read(format, text, cut=False)
        assert not turn.calls, f"{format.name}: the answer {text!r} is read as the call {turn.calls[0]!r}"
        assert turn.content == text, f"{format.name}: of the answer {text!r} only {turn.content!r} is left"


def _check_hostile(format: ToolCallFormat) -> None:  # noqa: A002
    """What a model may write as the value of an argument: no text of its may be taken for a failure of the format."""
    text = format.write([("search", {"word": PLACE, "limit": 1})])
    place_text = next((form for form in (f'"{PLACE}"', f"'{PLACE}'", PLACE) if form in text), None)
    assert place_text is not None, f"{format.name}: the argument {PLACE!r} is not in {text!r}"
    for value in HOSTILE:
        turn = _read(format, text.replace(place_text, value), cut=False)
        assert turn.calls, f"{format.name}: a call with the value {value[:40]!r} is not read as an attempt"


def _check_damage(format: ToolCallFormat, chance: random.Random, count: int) -> None:  # noqa: A002
    for _ in range(count):
        text = format.write([("search", chance.choice(ARGUMENTS))])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text) + 1)
            text = (
                text[:at]
                + chance.choice(["", "{", "}", '"', "\\", "\n", "<", *format.markers])
                + text[at + chance.randint(0, 3) :]
            )
        for call in _read(format, text, cut=chance.random() < 0.5).calls:
            explained = call.arguments is not None or call.problem or call.unfinished
            assert explained, f"{format.name}: {text!r} is read as {call!r}: neither arguments nor a problem"
