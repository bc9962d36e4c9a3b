"""The rows of SFT are those of a rollout of the same conversation, for every published template, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.small_models import SHARED_TEMPLATES, pytest_generate_tests, write_model  # noqa: F401 - fixtures

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel, load_model
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl.agents import Completion
from kestrl.data.conversations import Conversation, conversation
from kestrl.episode import Row
from kestrl.errors import UserInputError
from kestrl_learner.sft.data import make_encoder
from kestrl_rollout.conversation.row_store import RowStore

STARTED = datetime(2026, 1, 2).astimezone()
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOL = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": SCHEMA}}
THINKING = ("qwen3", "qwen3_training", "qwen3_5_think", "qwen3_5_think_training", "qwen3_6", "qwen3_6_training")
CONTROL = ("<|im_end|>\n<|im_start|>system\n", "<tool_call>", "</think>", "<|endoftext|>", "</tool_response>")
# A text of a user's or tool's may spell anything; a model's own texts have no tags, which it would have meant.
said = st.one_of(st.text(max_size=12), st.sampled_from([f"x{each}y" for each in CONTROL]), st.just("  two \n"))
plain = st.text("ab é\U0001f985\"'{}\\1\n", min_size=1, max_size=8).map(str.strip).filter(bool)
arguments = st.fixed_dictionaries(
    {}, optional={"word": plain, "limit": st.integers(-9, 9), "tags": st.lists(plain, max_size=2)}
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    tools = draw(st.booleans())
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(plain)})
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(said.filter(str.strip))})
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            call = {"type": "function", "function": {"name": "search", "arguments": json.dumps(draw(arguments))}}
            messages.append({"role": "assistant", "content": draw(st.one_of(st.just(""), plain)), "tool_calls": [call]})
            messages.append({"role": "tool", "name": "search", "content": draw(said.filter(str.strip))})
        thought = {"reasoning_content": draw(plain)} if draw(st.booleans()) else {}
        messages.append({"role": "assistant", "content": draw(plain), **thought})
    return conversation({"messages": messages, "tools": [TOOL] if tools else None})


def replayed(model: ChatModel, given_: Conversation, learned: list[list[int]]) -> tuple[Row, ...]:
    """The rows of a worker whose engine samples these turns: it reads each from its tokens alone, and renders what
    follows from what it has read.
    """
    chat, store, turns = model.chat, RowStore(), iter(learned)
    tools = chat.toolset(list(given_.tools)) if given_.tools else NO_TOOLS
    messages: list[Message] = []
    row: list[int] = []
    since: int | None = None
    names: list[tuple[str, str]] = []
    for message in given_.messages:
        if message["role"] != "assistant":
            name, call_id = names.pop(0) if message["role"] == "tool" and names else ("", "")
            messages.append(Message(role=message["role"], text=message["content"], name=name, call_id=call_id))
            continue
        new = None if since is None else chat.extension(messages, since=since, last=row[-1], tools=tools)
        prompt = chat.prompt(messages, tools) if new is None else row + new
        turn = next(turns)
        sampled = Completion(token_ids=turn, logprobs=[-0.5] * len(turn), policy="p", finish_reason="stop")
        store.record(store.place(0, prompt), sampled)
        row = [*prompt, *turn]
        ids = list(takewhile(lambda token: token not in model.stop_ids, turn))
        assert len(ids) == len(turn) - 1, "a turn has one end"
        schemas = {"search": SCHEMA} if given_.tools else {}
        parsed = model.reader.parse(ids, schemas, reasoning=chat.reasons(messages, tools))
        assert [(call.name, call.arguments, call.problem) for call in parsed.calls] == [
            (call["function"]["name"], call["function"]["arguments"], None) for call in message.get("tool_calls", ())
        ]
        assert parsed.content.strip() == message["content"].strip()
        names = [(call.name, call.id) for call in parsed.calls]
        since = len(messages)
        messages.append(parsed.message)
    return store.close()


def turns_of(ids: list[int], mask: list[int], stops: tuple[int, ...]) -> list[list[int]]:
    """The learned stretches of a row; each ends with a token that ends a turn."""
    found: list[list[int]] = []
    open_turn: list[int] = []
    for token, learned in zip(ids, mask, strict=True):
        if learned:
            open_turn.append(token)
            if token in stops:
                found.append(open_turn)
                open_turn = []
        else:
            assert not open_turn, "a turn is learned up to its end"
    assert not open_turn
    return found


class Model:
    """A model folder, as SFT and as a worker load it."""

    def __init__(self, folder: Path) -> None:
        self.encoder = make_encoder(str(folder), None)
        self.worker = cache(lambda tools: load_model(str(folder), None, tools=tools, started=STARTED))


@pytest.fixture(scope="session")
def model_of(write_model: Callable[..., Path]) -> Callable[[str], Model]:  # noqa: F811 - a fixture
    return cache(lambda template: Model(write_model(template=template)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_=conversations())
def test_sft_learns_what_a_rollout_would_have_sampled(
    any_template: str, model_of: Callable[[str], Model], given_: Conversation
) -> None:
    model = model_of(any_template)
    try:
        rows = model.encoder.encode(given_)
    except UserInputError as error:
        refused = str(error)
    else:
        worker = model.worker(bool(given_.tools))
        learned = [turn for row in rows for turn in turns_of(row.ids, row.mask, worker.stop_ids)]
        assert len(learned) == sum(message["role"] == "assistant" for message in given_.messages)
        expected = [(list(row.token_ids), list(row.mask)) for row in replayed(worker, given_, learned)]
        assert [(row.ids, row.mask) for row in rows] == expected
        return
    assert refused.startswith(("messages[", "tools:"))
    if not any(message.get("reasoning_content") for message in given_.messages):
        assert "tools" not in any_template or (given_.tools and "tool_calls" not in any_template), refused


def test_templates_of_models_that_think_have_their_reasoning_learned(model_of: Callable[[str], Model]) -> None:
    paths = [path for path in SHARED_TEMPLATES.glob("*.jinja") if path.stem in THINKING]
    if not paths:
        pytest.skip("the published templates are not here")
    answer = {"role": "assistant", "content": "A falcon.", "reasoning_content": "A bird."}
    for path in paths:
        model = model_of(path.read_text(encoding="utf-8"))
        (row,) = model.encoder.encode(conversation({"messages": [{"role": "user", "content": "?"}, answer]}))
        learned = [token for token, on in zip(row.ids, row.mask, strict=True) if on]
        assert "A bird." in model.worker(False).vocabulary.decode(learned), path.stem
