"""Attempts at a call that models write: a call with what was written, or an error for the model; never an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kestrl._shared.text.parser import TurnReader
from kestrl.episode import CallOutcome
from kestrl.formats import Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.formats.registry import BUILT_IN
from kestrl.testing.formats import HOSTILE, PLACE, check_format, pieces_of

SCHEMAS: Schemas = {
    "search": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "limit": {"$ref": "#/$defs/Number"}},
        "$defs": {"Number": {"allOf": [{"$ref": "#/definitions/Whole"}]}},
        "definitions": {"Whole": {"type": "integer"}},
    }
}
CALL = ("search", {"word": "a"})


def read(name: str, text: str) -> Turn:
    return BUILT_IN[name].read(pieces_of(BUILT_IN[name], text), SCHEMAS, cut=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "search", "parameters": {"word": "a"}}',
        '{"parameters": {"word": "a"}, "name": "search"}',
        '{"id": "1", "type": "function", "name": "search", "arguments": {"word": "a"}}',
        '{"type": "function", "function": {"name": "search", "parameters": {"word": "a"}}}',
        'I will look.\n{"parameters": {"word": "a"}, "name": "search"}',
    ],
)
def test_members_of_a_bare_call_come_in_any_order(text: str) -> None:
    (call,) = read("llama3_json", text).calls
    assert (call.name, call.arguments, call.problem) == (*CALL, "")


@pytest.mark.parametrize("text", ['{"name": "Ann", "age": 3}', '{"value": 4}', '{"a": {"name": "search"}}', "{x: 1}"])
def test_json_that_is_no_call_is_an_answer(text: str) -> None:
    assert read("llama3_json", text) == Turn(content=text, calls=[])
    assert read("hermes", text) == Turn(content=text, calls=[])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "search", "parameters": {"word": "a"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "args": {"word": "a"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"word": "a"}, "limit": 3}</tool_call>'),
        ("hermes", '{"name": "search", "arguments": {"word": "a"}}\n</tool_call>'),
        ("hermes", 'Let me see. {"name": "search", "args": {"word": "a"}}'),
        ("llama3_json", '{"name": "search", "args": {"word": "a"}}'),
        ("qwen_xml", "<function=search>\n<parameter=word>\na\n</parameter>\n</function>"),
        ("qwen_xml", "<function=search>\n<parameter=word>\na\n</parameter>\n</function>\n</tool_call>"),
        ("qwen_xml", "<function=search>\n<parameter=word>\na"),
        (
            "qwen_xml",
            "<tool_call><function=search>\n<parameter=word>\na\n<parameter=limit>\n3\n</parameter>\n</function></tool_call>",
        ),
    ],
)
def test_an_attempt_that_cannot_be_read_is_reported_to_the_model(name: str, text: str) -> None:
    (call,) = read(name, text).calls
    assert call.arguments is None
    assert call.problem


def test_a_closed_value_may_spell_another_parameter() -> None:
    text = "<tool_call><function=search>\n<parameter=word>\n<parameter=size>\n</parameter>\n</function></tool_call>"
    (call,) = read("qwen_xml", text).calls
    assert call.arguments == {"word": "<parameter=size>"}


def test_references_decide_how_a_value_is_read() -> None:
    text = "<tool_call><function=search>\n<parameter=limit>\n3\n</parameter>\n</function></tool_call>"
    (call,) = read("qwen_xml", text).calls
    assert call.arguments == {"limit": 3}


class Careless(ToolCallFormat):
    """As a user writes it: nothing is checked."""

    name, markers, example = "careless", (), "write /tool {...}"

    def __init__(self, arguments: Any, name: str = "search") -> None:
        self._call = WrittenCall(raw="raw\ud800", name=name, arguments=arguments, id="\ud800")

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del pieces, schemas, cut
        return Turn(content="\ud800", calls=[self._call])

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        raise ValueError


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\ud800": 1}, float("nan"), float("inf"), nested(500), nested(100_000), 10**5000, {1, 2}, b"x"],
    ids=["surrogate", "key", "nan", "inf", "deep", "very deep", "digits", "set", "bytes"],
)
@pytest.mark.parametrize("name", ["search", "nosuch"])
def test_no_format_passes_on_what_cannot_be_sent(value: Any, name: str, load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    parsed = TurnReader(vocabulary, Careless({"word": value}, name)).parse(vocabulary.whole("x"), SCHEMAS)
    (call,) = parsed.calls
    assert (call.arguments, call.problem) == (None, CallOutcome.INVALID_JSON)
    json.dumps([call.raw, call.id, call.message, parsed.content, parsed.text]).encode()
    (call.raw + call.id + call.message + parsed.content).encode()


def test_values_at_the_bound_are_passed_on(load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    arguments = {"word": nested(60), "limit": 10**400}
    (call,) = TurnReader(vocabulary, Careless(arguments)).parse(vocabulary.whole("x"), SCHEMAS).calls
    assert (call.arguments, call.problem) == (arguments, None)


class Documented(Careless):
    """A format as docs/templates.md shows one: JSON arguments behind a name."""

    name = "documented"
    example = "write /search {...}"

    def __init__(self) -> None:
        super().__init__({})

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        del schemas, cut
        name, _, rest = "".join(pieces).removeprefix("/").partition(" ")
        try:
            arguments = json.loads(rest)
        except ValueError as error:
            return Turn(content="", calls=[WrittenCall(raw=rest, name=name, problem=str(error))])
        return Turn(content="", calls=[WrittenCall(raw=rest, name=name, arguments=arguments)])


@pytest.mark.parametrize("value", [*HOSTILE, "[" * 100_000 + "]" * 100_000, "[" * 100_000], ids=lambda each: each[:9])
def test_a_text_that_no_parser_reads_is_an_attempt_of_the_model(value: str, load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    text = f'/search {{"word": {value}}}'
    for reader in (Documented(), *BUILT_IN.values()):
        parsed = TurnReader(vocabulary, reader).parse(vocabulary.whole(text), SCHEMAS)
        parsed.text.encode()
        if reader.name == "documented":
            (call,) = parsed.calls
            assert (call.arguments, call.problem) == (None, CallOutcome.INVALID_JSON)


@pytest.mark.parametrize("format", BUILT_IN.values(), ids=list(BUILT_IN))
def test_calls_with_such_values_are_reported_to_the_model(format: ToolCallFormat, load: Callable[..., Any]) -> None:  # noqa: A002
    vocabulary = load().vocabulary
    written = format.write([("search", {"word": PLACE})])
    quoted = next(form for form in (f'"{PLACE}"', f"'{PLACE}'", PLACE) if form in written)
    for value in (*HOSTILE, "[" * 100_000 + "]" * 100_000):
        parsed = TurnReader(vocabulary, format).parse(vocabulary.whole(written.replace(quoted, value)), SCHEMAS)
        for call in parsed.calls:
            assert call.arguments is None or json.dumps(call.arguments, allow_nan=False)
            assert call.arguments is not None or call.problem is CallOutcome.INVALID_JSON
        assert parsed.calls, f"{format.name}: {value[:20]}"
        parsed.text.encode()


def test_the_conformance_suite_finds_a_format_that_raises_on_them() -> None:
    class Fragile(Documented):
        def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
            turn = super().read(pieces, schemas, cut=cut)
            return Turn(content="".join(pieces), calls=()) if turn.calls[0].problem else turn

        def write(self, calls: Sequence[tuple[str, Any]]) -> str:
            if len(calls) > 1:
                raise ValueError
            return f"/{calls[0][0]} {json.dumps(calls[0][1])}"

    with pytest.raises(AssertionError, match="is not read as an attempt"):
        check_format(Fragile())
