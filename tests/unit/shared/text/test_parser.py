"""Reading turns: every attempt at a call is seen once, none inside reasoning, none by mere characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kestrl._shared.text.parser import Parsed, TurnReader
from kestrl.agents import Call
from kestrl.episode import CallOutcome
from kestrl.formats.registry import BUILT_IN

TOOLS: dict[str, Any] = {"search": {}, "answer": {}}
HERMES = BUILT_IN["hermes"]
CALL = '<tool_call>\n{"name": "search", "arguments": {"word": "a"}}\n</tool_call>'


@pytest.fixture(params=[True, False], ids=["marker tokens", "marker text"])
def read(request: pytest.FixtureRequest, load: Callable[..., Any]) -> Callable[..., Parsed]:
    """Parses what a model sampled when it wrote the given text."""
    vocabulary = load(markers=request.param).vocabulary
    parser = TurnReader(vocabulary, HERMES)
    return lambda text, **options: parser.parse(vocabulary.whole(text), TOOLS, **options)


def test_a_call(read: Callable[..., Parsed]) -> None:
    parsed = read(f"Let me see.\n{CALL}")
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.problem) == ("search", {"word": "a"}, None)
    assert json.loads(call.raw) == {"name": "search", "arguments": {"word": "a"}}
    assert parsed.content == "Let me see."
    assert parsed.text == f"Let me see.\n{CALL}"


def test_several_calls_in_order(read: Callable[..., Parsed]) -> None:
    parsed = read(CALL + " and " + CALL.replace('"a"', '"b"'))
    assert [call.arguments for call in parsed.calls] == [{"word": "a"}, {"word": "b"}]
    assert parsed.content == "and"


def test_text_without_a_call(read: Callable[..., Parsed]) -> None:
    parsed = read("A small falcon.")
    assert (parsed.calls, parsed.content, parsed.message.reasoning) == ([], "A small falcon.", None)


def test_a_call_inside_reasoning_is_none(read: Callable[..., Parsed]) -> None:
    parsed = read(f"<think>I could {CALL}</think>No.")
    assert parsed.calls == []
    assert parsed.content == "No."
    assert parsed.message.text == "No."
    assert parsed.message.reasoning is not None
    assert "I could" in parsed.message.reasoning


def test_reasoning_that_the_prompt_opened(read: Callable[..., Parsed]) -> None:
    assert read(f"{CALL}</think>{CALL}", reasoning=True).calls[0].problem is None
    assert len(read(f"{CALL}</think>{CALL}", reasoning=True).calls) == 1
    assert read(CALL, reasoning=True).calls == []


@pytest.mark.parametrize(("cut", "why"), [(True, "length limit"), (False, "its end is missing")])
def test_an_unfinished_call(read: Callable[..., Parsed], cut: bool, why: str) -> None:
    (call,) = read('<tool_call>{"name": "sea', cut=cut).calls
    assert call.problem is CallOutcome.TRUNCATED
    assert why in call.message
    assert call.raw == '{"name": "sea'


def test_a_call_inside_a_call(read: Callable[..., Parsed]) -> None:
    first, second = read(f'<tool_call>{{"name": {CALL}').calls
    assert (first.problem, second.problem) == (CallOutcome.TRUNCATED, None)


def test_stray_markers_are_ignored(read: Callable[..., Parsed]) -> None:
    parsed = read("</tool_call>Hm.</think>")
    assert parsed.calls == []
    assert parsed.content.startswith("Hm.")


def test_characters_are_no_call_where_the_marker_is_a_token(load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    reader = TurnReader(vocabulary, HERMES)
    (call,) = reader.parse(list(vocabulary.content(CALL)), TOOLS).calls
    assert (call.arguments, call.problem) == (None, CallOutcome.INVALID_JSON)
    assert "does not stand between" in call.message
    assert reader.parse(list(vocabulary.content(CALL)), {}).calls == []  # no tool is offered: an answer


def test_reasoning_keeps_its_sampled_tokens(load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    ids = vocabulary.whole("<think>\nSo.\n</think>\n\nYes.")
    message = TurnReader(vocabulary, HERMES).parse(ids, TOOLS).message
    assert (message.reasoning, message.text) == ("So.", "Yes.")
    assert list(message.reasoning_ids or ()) == vocabulary.whole("So.")
    assert list(message.ids or ()) == vocabulary.whole("Yes.")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("", "Expecting value"),
        ("{'name': 'search'}", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 5}', 'no "name"'),
        ('{"name": "search", "arguments": "x"}', '"arguments" is not a JSON object'),
        ('{"name": "search", "arguments": {"x": NaN}}', "NaN is not valid JSON"),
        ('{"name": "search", "arguments": {"x": "\\ud800"}}', "surrogates not allowed"),
        ('{"name": "search", "arguments": ' + "[" * 100_000, "nested too deeply"),
        ('{"name": "search", "arguments": {"x": ' + "9" * 5_000 + "}}", "digit"),
    ],
)
def test_a_call_that_cannot_be_parsed_has_a_reason(read: Callable[..., Parsed], raw: str, expected: str) -> None:
    (call,) = read(f"<tool_call>{raw}</tool_call>").calls
    assert call.problem is CallOutcome.INVALID_JSON
    assert expected in call.message
    assert '<tool_call>{"name"' in call.message
    assert call.arguments is None


def test_a_call_of_an_unknown_tool_lists_the_known_ones(load: Callable[..., Any]) -> None:
    vocabulary = load().vocabulary
    ids = vocabulary.whole('<tool_call>{"name": "fly", "arguments": {}}</tool_call>')
    reader = TurnReader(vocabulary, HERMES)
    (call,) = reader.parse(ids, TOOLS).calls
    assert (call.problem, call.name) == (CallOutcome.UNKNOWN_TOOL, "fly")
    assert "search, answer" in call.message
    assert "none" in reader.parse(ids, {}).calls[0].message


def test_arguments_may_be_left_out(read: Callable[..., Parsed]) -> None:
    (call,) = read('<tool_call>{"name": "search"}</tool_call>').calls
    assert call == Call(name="search", arguments={}, raw='{"name": "search"}')
