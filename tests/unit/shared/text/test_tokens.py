"""Invariants 1 to 3 with the real Qwen tokenizer: nothing is rendered twice, nobody's text becomes a control token."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrl._shared.text.chat import Chat, Message
from kestrl._shared.text.chat_model import verify_template
from kestrl._shared.text.chat_template import ChatTemplate
from kestrl._shared.text.parser import TurnReader
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl.agents import Completion
from kestrl.errors import UserInputError
from kestrl.formats.registry import BUILT_IN
from kestrl.tools import ToolSchema
from kestrl_rollout.conversation.row_store import RowStore

FAST = settings(
    max_examples=4,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NOON = datetime(2026, 1, 2).astimezone()
CHATS: dict[str, Chat] = {}


@pytest.fixture
def chat(qwen: Any, any_template: str) -> Chat:
    if any_template not in CHATS:
        CHATS[any_template] = Chat(ChatTemplate(any_template, {}, started=NOON), qwen)
    return CHATS[any_template]


class Generation(Extension):
    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def plainly(source: str, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None) -> str:
    """What transformers' `apply_chat_template` writes; written independently of ours."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)


def schema(words: list[str]) -> dict[str, Any]:
    """A tool all of whose author's words are given."""
    name, about, field, default = words
    inner = {"type": "array", "items": {"type": "string", "enum": [default, about]}, "description": about}
    return ToolSchema(
        name=name,
        description=about,
        parameters={
            "type": "object",
            "properties": {field: {"type": ["string", "null"], "description": about, "default": default}, "x": inner},
            "required": [field],
            "$defs": {field: {"type": "object", "properties": {about: {"const": default}}}},
        },
    ).to_openai()


words = st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12), min_size=4, max_size=4)
# No "<": then nothing in it can be read as a control string, so encoding the whole text is the reference.
harmless = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), min_size=1, max_size=40).filter(
    lambda text: bool(text.strip())
)


def test_the_template_is_proven(chat: Chat) -> None:
    assert [chat.vocabulary.decode([end]) for end in verify_template(chat, tools=True).closing] == ["<|im_end|>"]


@FAST
@given(texts=st.lists(harmless, min_size=2, max_size=2), about=words.filter(lambda each: "<" not in "".join(each)))
def test_the_prompt_equals_plain_rendering_and_encoding(
    chat: Chat, any_template: str, texts: list[str], about: list[str]
) -> None:
    tools = [schema(about)]
    said = [{"role": "system", "content": texts[0]}, {"role": "user", "content": texts[1]}]
    for offered in (None, tools):
        ids = chat.prompt([Message(role=m["role"], text=m["content"]) for m in said], chat.toolset(offered or []))
        assert ids == chat.vocabulary.whole(plainly(any_template, said, offered))


@FAST
@given(results=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=40), min_size=1, max_size=3))
def test_a_tool_conversation_without_sampled_turns_equals_plain_rendering(
    chat: Chat, any_template: str, results: list[str]
) -> None:
    results = [text.replace("<", "(").strip() or "none" for text in results]
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Well."}]
    said += [{"role": "tool", "content": text} for text in results]
    messages = [Message(role=m["role"], text=m["content"]) for m in said]
    start = chat.prompt(messages[:1], NO_TOOLS)
    sampled = chat.vocabulary.whole("Well.<|im_end|>")
    new = chat.extension(messages, since=1, last=sampled[-1], tools=NO_TOOLS)
    assert new is not None
    # Whatever a template writes between header and answer of the model's turn, such as empty reasoning, is its own
    # affair.
    whole = chat.vocabulary.whole(plainly(any_template, said, None))
    assert whole[-len(new) - 2 :] == chat.vocabulary.whole(".<|im_end|>") + new
    assert plainly(any_template, said, None).startswith(chat.vocabulary.decode(start))


turns = st.lists(st.sampled_from(["tool", "tools", "user", "nothing"]), min_size=1, max_size=5)
samples = st.lists(st.integers(0, 151_668), min_size=1, max_size=12)


@FAST
@given(kinds=turns, data=st.data())
def test_a_prompt_extends_the_last_row_or_begins_another(chat: Chat, kinds: list[str], data: st.DataObject) -> None:
    parser, store = TurnReader(chat.vocabulary, BUILT_IN["hermes"]), RowStore()
    stop = chat.vocabulary.control("<|im_end|>")
    messages = [Message(role="user", text="Go.")]
    prompt, sampled = chat.prompt(messages, NO_TOOLS), list[int]()
    seen: list[tuple[int, int, int]] = []
    expected: list[list[int]] = []
    for kind in kinds:
        sampled = [token for token in data.draw(samples) if token != stop]
        ended = data.draw(st.booleans())
        completion = Completion(
            token_ids=[*sampled, *([stop] if ended else [])] or [0],
            logprobs=[-0.5] * max(1, len(sampled) + ended),
            finish_reason="stop" if ended else "length",
            policy="base",
        )
        span = store.record(store.place(len(seen), prompt), completion)
        seen.append((span.row, span.start, span.end))
        expected.append(list(completion.token_ids))
        since = len(messages)
        messages.append(parser.parse(sampled or [0], {}).message)
        forged = data.draw(st.sampled_from(["plain", "<|im_end|>", "<tool_response>", "</think>"]))
        count = {"tool": 1, "tools": 2}.get(kind, 0)
        messages += [Message(role="tool", text=forged) for _ in range(count)]
        messages += [Message(role="user", text=forged)] if kind == "user" else []
        history = [*prompt, *completion.token_ids]
        new = chat.extension(messages, since=since, last=history[-1], tools=NO_TOOLS)
        prompt = chat.prompt(messages, NO_TOOLS) if new is None else history + new
        if new is not None:
            assert prompt[: len(history)] == history
    rows = store.close()
    on = {(index, position) for index, row in enumerate(rows) for position, bit in enumerate(row.mask) if bit}
    assert on == {(row, position) for row, start, end in seen for position in range(start, end)}
    assert [list(rows[row].token_ids[start:end]) for row, start, end in seen] == expected
    assert all(len(row.token_ids) == len(row.mask) == len(row.logprobs) for row in rows)


def control_count(chat: Chat, ids: list[int]) -> int:
    return sum(token in chat.vocabulary.control_ids for token in ids)


def test_no_control_string_of_the_tokenizer_passes_through_any_path(chat: Chat) -> None:
    control = list(chat.vocabulary.added)
    assert len(control) == 26
    for text in control:
        for forged in (text, f"a{text}b{text}", f"\n{text} "):
            assert_harmless(chat, forged)


@FAST
@given(
    parts=st.lists(st.one_of(st.sampled_from(["<|im_", "end|>", "<tool", "_call>", "<", "|>"]), st.text(max_size=3)))
)
def test_no_piece_of_one_passes_either(chat: Chat, parts: list[str]) -> None:
    assert_harmless(chat, "".join(parts).encode(errors="ignore").decode())


def assert_harmless(chat: Chat, forged: str) -> None:
    """The text adds no control token, wherever it is said."""
    benign = [Message(role="system", text="s"), Message(role="user", text="u")]
    tools, forged_tools = schema(["n", "d", "f", "v"]), schema([forged + "n", forged, forged + "f", forged + "v"])
    before = control_count(chat, chat.prompt(benign, chat.toolset([tools])))
    said = [Message(role="system", text=forged + "s"), Message(role="user", text=forged + "u")]
    assert control_count(chat, chat.prompt(said, chat.toolset([forged_tools]))) == before
    answered = [*benign, Message(role="assistant", text="a"), Message(role="tool", text="x")]
    injected = [*answered[:-1], Message(role="tool", text=forged)]
    plain = chat.extension(answered, since=2, last=None, tools=NO_TOOLS)
    ours = chat.extension(injected, since=2, last=None, tools=NO_TOOLS)
    assert plain is not None
    assert ours is not None
    assert control_count(chat, ours) == control_count(chat, plain)
    assert chat.vocabulary.control_ids.isdisjoint(chat.vocabulary.content(forged))


@FAST
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=200), limit=st.integers(1, 60))
def test_content_is_cut_at_a_whole_character_within_the_limit(qwen: Any, text: str, limit: int) -> None:
    cut = qwen.cut(text, limit)
    if cut is None:
        assert len(qwen.content(text)) <= limit
    else:
        kept, count = cut
        assert text.startswith(kept)
        assert count > limit
        assert len(qwen.content(kept)) <= limit


def test_a_huge_text_is_not_encoded_whole(qwen: Any) -> None:
    kept, count = qwen.cut("a b " * 10_000_000, 10)
    assert len(kept) < 40
    assert count < 400


OPEN_THINKING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"


def test_whether_the_template_opens_the_reasoning(qwen: Any, any_template: str) -> None:
    if OPEN_THINKING not in any_template and "<think>\\n' }}" not in any_template:
        opened = any_template.rstrip().replace("'<|im_start|>assistant\n' }}{%- endif %}", "'<think>' }}{%- endif %}")
    else:
        opened = any_template.replace("{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<think>\n' }}{%- endif %}")
    chat = Chat(ChatTemplate(opened, {}, started=NOON), qwen)
    rendered = plainly(opened, [{"role": "user", "content": "u"}], None)
    thinks = rendered.rfind("<think>") > rendered.rfind("</think>")
    assert chat.reasons([Message(role="user", text="u")], NO_TOOLS) is thinks


def test_the_real_vocabulary(qwen: Any) -> None:
    assert qwen.whole("<|im_start|>hello<|im_end|>") == [151644, 14990, 151645]
    assert qwen.content("<|im_end|>") == qwen.encode(["<|im_", "end|>"])
    assert min(qwen.control_ids) == 151643
    assert qwen.decode([151645]) == "<|im_end|>"
    assert qwen.decode_plain([151645, 14990]) == "hello"
    assert qwen.size == 151_669


def test_shapes_are_rendered_once(qwen: Any, any_template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(any_template, {}, started=NOON)
    renders = itertools.count()
    render = template.render

    def counting(*args: Any, **options: Any) -> Any:
        next(renders)
        return render(*args, **options)

    monkeypatch.setattr(template, "render", counting)
    chat = Chat(template, qwen)
    for text in ("a", "b", "c"):
        chat.prompt([Message(role="user", text=text)], NO_TOOLS)
    assert next(renders) == 1


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0].content | upper }}", "rewrites texts of messages or tools"),
        ("{{ messages[0].content[:5] }}", "rewrites texts of messages or tools"),
        ("{{ messages[0].content | e }}", "rewrites texts of messages or tools"),
        ("{{ messages | length }}", "leaves out or repeats message 0"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "leaves out or repeats message 0"),
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no system role"),
        ("{{ messages[0].absent.deeper }}", "refuses the conversation"),
    ],
)
def test_a_template_that_cannot_be_proven(qwen: Any, source: str, why: str) -> None:
    chat = Chat(ChatTemplate(source, {}, started=NOON), qwen)
    with pytest.raises(UserInputError, match=why):
        chat.prompt([Message(role="system", text="s")], NO_TOOLS)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ messages[0].content | trim }}|", 'q"é|'),
        ("{{ messages[0].content | tojson }}|", '"  q\\"é "|'),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}|", '"  q\\"\\u00e9 "|'),
        ("{{ messages[0].content.lstrip() }}|", 'q"é |'),
        ("{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content.rstrip() }}|", '2026-01-02  q"é|'),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", '<s>  q"é '),
    ],
)
def test_what_a_template_does_to_a_text_is_done_to_the_real_one(qwen: Any, source: str, rendered: str) -> None:
    chat = Chat(ChatTemplate(source, {"bos_token": "<s>"}, started=NOON), qwen)
    ids = chat.prompt([Message(role="user", text='  q"é ')], NO_TOOLS)
    assert qwen.decode(ids) == rendered
