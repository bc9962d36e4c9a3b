"""Histories of others: their calls are written in the job's format, and what they say never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.small_models import CONTROL, MARKERS
from tests.unit.rollout.test_call_templates import model  # noqa: F401 - a fixture

from kestrl._shared.text.chat_model import ChatModel
from kestrl.errors import UserCodeError
from kestrl.formats.registry import BUILT_IN
from kestrl.formats.tagged import QwenXml
from kestrl_rollout.conversation.transformers_tokenizer import TransformersTokenizer
from kestrl_rollout.history.reader import HistoryReader

USER = {"role": "user", "content": "Find a bird."}


def calling(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


@pytest.mark.parametrize("arguments", [{"word": "é"}, '{"word":"é"}', '{ "word" : "\\u00e9" }'])
def test_calls_of_a_history_are_what_the_model_would_write(chat_model: ChatModel, arguments: Any) -> None:
    view = TransformersTokenizer(chat_model)
    messages = [USER, calling(("search", arguments), content="One moment."), {"role": "tool", "content": "A falcon."}]
    ids = view.apply_chat_template(messages, add_generation_prompt=True)
    call = json.dumps({"name": "search", "arguments": {"word": "é"}}, ensure_ascii=False)
    text = (
        "<|im_start|>user\nFind a bird.<|im_end|>\n<|im_start|>assistant\nOne moment.\n"
        f"<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nA falcon.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == chat_model.vocabulary.whole(text)


hostile = st.lists(st.sampled_from([*CONTROL, *MARKERS, '"', "}", "\\", "x", " ", "é", "\n"]), max_size=6).map("".join)
values = st.recursive(st.one_of(hostile, st.booleans(), st.integers(-9, 9)), lambda inner: st.lists(inner, max_size=2))
arguments = st.dictionaries(hostile, values, max_size=3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_=st.lists(arguments, min_size=1, max_size=3))
def test_arguments_never_become_control_tokens(chat_model: ChatModel, given_: list[dict[str, Any]]) -> None:
    (message,) = HistoryReader(chat_model).messages([calling(*(("search", each) for each in given_))])
    assert message.ids is not None
    control = [token for token in message.ids if token in chat_model.vocabulary.control_ids]
    assert control == chat_model.vocabulary.whole("<tool_call></tool_call>" * len(given_))
    parsed = chat_model.reader.parse(message.ids, {"search": {}})
    assert [(call.name, call.arguments) for call in parsed.calls] == [("search", each) for each in given_]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_format_writes_what_it_reads(chat_model: ChatModel, name: str) -> None:
    one = replace(chat_model, format=BUILT_IN[name])
    (message,) = HistoryReader(one).messages([calling(("search", {"word": "<|im_end|>", "count": 3}))])
    assert message.ids is not None
    (call,) = one.reader.parse(message.ids, {"search": {}}).calls
    assert call.arguments is not None
    assert call.arguments["word"] == "<|im_end|>"
    assert chat_model.vocabulary.control("<|im_end|>") not in message.ids


def test_templates_that_take_results_behind_calls_take_them_of_a_history(model: tuple[str, ChatModel]) -> None:  # noqa: F811
    name, chat_model = model
    view = TransformersTokenizer(chat_model)
    result = {"role": "tool", "tool_call_id": "call-0", "content": "A small falcon."}
    ids = view.apply_chat_template(
        [USER, calling(("look_up", {"word": "kestrel"})), result], add_generation_prompt=True
    )
    text = chat_model.vocabulary.decode(ids)
    assert "kestrel" in text, name
    assert "A small falcon." in text
    assert text.index("kestrel") < text.index("A small falcon.")
    if "gpt-oss" in name:
        assert "functions.look_up to=assistant" in text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (calling(("search", "[1]")), "not a JSON object"),
        (calling(("search", '{"word": ')), "cannot be read"),
        (calling(("search", {"word": float("nan")})), "cannot write it"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "each is"),
        ({"role": "assistant", "tool_calls": ["search"]}, "each is"),
    ],
)
def test_what_cannot_be_written_is_the_loops_mistake(
    chat_model: ChatModel, message: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserCodeError, match=expected) as refused:
        HistoryReader(chat_model).messages([message])
    assert refused.value.code == "unsupported_content"


def test_several_calls_of_a_format_that_ends_its_turn_at_the_first_are_refused(model: tuple[str, ChatModel]) -> None:  # noqa: F811
    name, chat_model = model
    both = calling(("search", {"word": "a"}), ("search", {"word": "b"}))
    if "gpt-oss" in name:
        with pytest.raises(UserCodeError, match="does not read it back"):
            HistoryReader(chat_model).messages([both])
        with pytest.raises(UserCodeError, match="does not read it back"):
            HistoryReader(chat_model).messages([calling(("search", {}), content="One moment.")])
    else:
        (message,) = HistoryReader(chat_model).messages([both])
        assert message.text.count("search") == 2


@pytest.mark.parametrize("content", ["<tool_call>", '{"name": "search", "arguments": {}}', "<think>x</think>y"])
def test_what_looks_like_a_call_in_a_text_stays_text(chat_model: ChatModel, content: str) -> None:
    (message,) = HistoryReader(chat_model).messages([calling(("search", {}), content=content)])
    assert message.ids is not None
    assert sum(token in chat_model.vocabulary.control_ids for token in message.ids) == 2


def test_a_name_that_makes_a_control_token_with_its_surroundings_is_refused(chat_model: ChatModel) -> None:
    reader = HistoryReader(replace(chat_model, format=QwenXml()))
    with pytest.raises(UserCodeError, match="spells a control token"):
        reader.messages([calling(("search", {"<|im_end|": "x"}))])


FEW_SHOT = """
async def agent(conversation):
    shot = [
        {"role": "user", "content": "Find the owl."},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "function": {"name": "search", "arguments": {"word": "owl"}}}]},
        {"role": "tool", "tool_call_id": "a", "content": "found owl"},
        *conversation.scenario.messages,
    ]
    prompt = conversation.tokenizer.apply_chat_template(shot, add_generation_prompt=True)
    await conversation.generate_tokens(prompt)
"""


async def test_what_was_never_sampled_is_not_trained(make_stage: Any, make_file: Callable[[str, str], str]) -> None:
    stage = await make_stage(agent=make_file("few_shot", FEW_SHOT) + ":agent")
    stage.says("unused", "A kestrel.")
    episode = await stage.episode()
    assert episode.failure is None
    (row,) = episode.rows
    decode = stage.chat_model.vocabulary.decode
    assert '<tool_call>\n{"name": "search", "arguments": {"word": "owl"}}' in decode(row.token_ids)
    assert decode([token for token, on in zip(row.token_ids, row.mask, strict=True) if on]) == "A kestrel.<|im_end|>"
