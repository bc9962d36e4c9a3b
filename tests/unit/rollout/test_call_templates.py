"""Templates that take a tool's result only behind a message with `tool_calls`: gpt-oss's and Mistral's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from tests.fakes.engine import Completion, Prompt
from tests.fakes.small_models import byte_tokenizer
from tests.wheels import unpacked
from tokenizers import AddedToken

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import SYNTHETIC_TOOL, ChatModel, load_model
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl.episode import CallOutcome, StopReason

NOON = datetime(2026, 1, 2).astimezone()
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[ARGS]",
        "[CALL_ID]",
        "[TOOL_CONTENT]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[THINK]",
        "[/THINK]",
    ),
)


def mistral(version: str, **options: Any) -> str:
    return build_chat_template(TemplateConfig(version=TokenizerVersion(version), **options))


GPT_OSS = unpacked("trl==1.16.0") / "trl" / "chat_templates" / "gptoss.jinja"
"""gpt-oss's own template, unchanged."""
PUBLISHED: dict[str, tuple[str, str, Sequence[str]]] = {
    "gpt-oss": (GPT_OSS.read_text(encoding="utf-8"), "<|return|>", HARMONY),
    **{
        f"mistral-{version}-{'-'.join(options) or 'tekken'}": (mistral(version, **options), "</s>", MISTRAL)
        for version, options in (
            *(("v3", {"spm": True}), ("v3", {}), ("v7", {"spm": True}), ("v11", {}), ("v13", {})),
            ("v13", {"thinking_support": True}),
        )
    },
}
"""Each template, the token that ends a turn, and its control tokens."""
CALL = {"name": "look_up", "arguments": {"word": "kestrel"}}
QUESTION = {"role": "user", "content": "What is a kestrel?"}


@pytest.fixture(scope="session", params=PUBLISHED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ChatModel]:
    folder = write(request.param, tmp_path_factory.mktemp("model"))
    return request.param, load_model(str(folder), None, tools=True, offered=True, started=NOON)


def write(name: str, folder: Path) -> Path:
    source, end, control = PUBLISHED[name]
    tokenizer = byte_tokenizer(markers=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}), encoding="utf-8")
    return folder


def plainly(name: str, messages: list[dict[str, Any]], *, generate: bool = True, tools: Any = None) -> str:
    """What transformers' `apply_chat_template` writes; written independently of ours."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": NOON.strftime}
    template = environment.from_string(PUBLISHED[name][0])
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)


def turn_of(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": each, "type": "function", "function": CALL} for each in ids],
    }


def results_of(*texts: str, ids: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "content": text, "tool_call_id": each, "name": "look_up"}
        for text, each in zip(texts, ids, strict=True)
    ]


def ours(chat_model: ChatModel, sampled: Sequence[int], texts: Sequence[str]) -> list[Message]:
    """The model's turn and the results of its calls, as a conversation keeps them."""
    ended = bool(sampled) and sampled[-1] in chat_model.stop_ids
    schemas = {"look_up": SYNTHETIC_TOOL["function"]["parameters"]}
    parsed = chat_model.reader.parse(sampled[:-1] if ended else sampled, schemas)
    calls = [*parsed.calls] + [None] * len(texts)
    return [
        parsed.message,
        *(
            Message(role="tool", text=text, name=call.name if call else "", call_id=call.id if call else "")
            for text, call in zip(texts, calls, strict=False)
        ),
    ]


@pytest.mark.parametrize("texts", [["A small falcon."], ['A "bird".', "é\n2"]], ids=["one", "two"])
def test_a_turn_with_results_is_what_the_template_writes(model: tuple[str, ChatModel], texts: list[str]) -> None:
    name, chat_model = model
    if name == "gpt-oss" and len(texts) > 1:
        pytest.skip("a turn of gpt-oss ends at its first call")
    ids = ["aB3dE6gH9", "Zx4567890"][: len(texts)]
    tools = [SYNTHETIC_TOOL]
    asked = plainly(name, [QUESTION], tools=tools)
    called = plainly(name, [QUESTION, turn_of(*ids)], generate=False, tools=tools)
    whole = plainly(name, [QUESTION, turn_of(*ids), *results_of(*texts, ids=ids)], tools=tools)
    chat, toolset = chat_model.chat, chat_model.chat.toolset(tools)
    start = [Message(role="user", text=QUESTION["content"])]
    prompt = chat.prompt(start, toolset)
    sampled = chat.vocabulary.whole(called.removeprefix(asked))
    assert sampled[-1] in chat_model.stop_ids
    messages = [*start, *ours(chat_model, sampled, texts)]
    new = chat.extension(messages, since=1, last=sampled[-1], tools=toolset)
    assert new is not None
    assert prompt == chat.vocabulary.whole(asked)
    assert chat.vocabulary.decode([*prompt, *sampled, *new]) == whole
    assert [*prompt, *sampled, *new] == chat.vocabulary.whole(whole)
    assert chat.prompt(messages, toolset) == [*prompt, *sampled, *new]  # as for a row that begins anew


FAST = settings(
    max_examples=15,
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
forged = st.one_of(texts, st.sampled_from([*HARMONY, *MISTRAL, '", "x": "', "aB3dE6gH9"]))


@FAST
@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(0, 280), max_size=8), st.lists(forged, min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_sampled_tokens_stay_and_nobody_writes_control_tokens(
    model: tuple[str, ChatModel], turns: list[tuple[list[int], list[str]]]
) -> None:
    chat_model = model[1]
    chat, stop = chat_model.chat, chat_model.stop_ids[0]
    toolset = chat.toolset([SYNTHETIC_TOOL])
    messages = [Message(role="user", text="Go.")]
    history = chat.prompt(messages, toolset)
    for sampled, results in turns:
        plain, hostile = list[int](), list[int]()
        for said, into in (["x"] * len(results), plain), (results, hostile):
            answered = [Message(role="tool", text=text, name=text, call_id=text) for text in said]
            turn = chat_model.reader.parse(sampled, {}).message
            new = chat.extension([*messages, turn, *answered], since=len(messages), last=stop, tools=toolset)
            assert new is not None
            into += new
        control = chat.vocabulary.control_ids
        assert [each for each in plain if each in control] == [each for each in hostile if each in control]
        messages += [turn, *answered]
        history += [*sampled, stop, *hostile]
        assert chat.prompt(messages, toolset)[: len(history)][-len(hostile) :] == hostile


def test_a_history_that_the_template_rewrites_keeps_the_sampled_calls(tmp_path: Path) -> None:
    """Mistral's older templates move the tools before the last question."""
    chat_model = load_model(str(write("mistral-v3-tekken", tmp_path)), None, tools=True, started=NOON)
    chat, toolset = chat_model.chat, chat_model.chat.toolset([SYNTHETIC_TOOL])
    sampled = chat.vocabulary.whole('[TOOL_CALLS] [{"name":"look_up","arguments":{},"id":"aB3dE6gH9"}]</s>')
    messages = [Message(role="user", text="Who?"), *ours(chat_model, sampled, ["A falcon."])]
    messages += [Message(role="assistant", text="A bird."), Message(role="user", text="Sure?")]
    assert chat.extension(messages, since=3, last=None, tools=toolset) is None
    written = chat.vocabulary.decode(chat.prompt(messages, toolset))
    assert written.startswith(
        '<s>[INST]Who?[/INST][TOOL_CALLS] [{"name":"look_up","arguments":{},"id":"aB3dE6gH9"}]</s>'
    )
    assert '[TOOL_RESULTS]{"content": "A falcon.", "call_id": "aB3dE6gH9"}[/TOOL_RESULTS]A bird.</s>' in written
    assert written.endswith("[INST]Sure?[/INST]")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('[{"name": "look_up", "arguments": {}, "id": "mine45678"}]', "mine45678"),
        ('[{"name": "look_up", "arguments": {}}]', "000000002"),
        ('[{"name": "look_up", "arguments": {}, "id": "\\"}, {"}]', "000000002"),
        ("not a call", "000000002"),
    ],
    ids=["own", "none", "unsafe", "unreadable"],
)
def test_a_result_repeats_the_id_that_the_model_gave_its_call(tmp_path: Path, call: str, expected: str) -> None:
    chat_model = load_model(str(write("mistral-v3-tekken", tmp_path)), None, tools=True, started=NOON)
    sampled = chat_model.vocabulary.whole(f"[TOOL_CALLS]{call}</s>")
    messages = [Message(role="user", text="Who?"), *ours(chat_model, sampled, ["A falcon."])]
    new = chat_model.chat.extension(messages, since=1, last=sampled[-1], tools=NO_TOOLS)
    assert new is not None
    assert f'"call_id": "{expected}"' in chat_model.vocabulary.decode(new)


ANALYSIS = "<|channel|>analysis<|message|>I should look it up.<|end|><|start|>assistant"
ASKS = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"word": "kestrel"}<|call|>'
ANSWERS = (
    "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>The answer is 4.<|return|>"
)


async def test_an_episode_of_gpt_oss(make_stage: Callable[..., Any], tmp_path: Path) -> None:
    stage = await make_stage(folder=write("gpt-oss", tmp_path), offers_tools=True)
    loaded = load_model(str(tmp_path), None, tools=True, started=NOON)
    prompts: list[Sequence[int]] = []

    def script(prompt: Prompt) -> Completion:
        prompts.append(prompt.token_ids)
        return Completion(token_ids=loaded.vocabulary.whole((ANALYSIS + ASKS, ANSWERS)[len(prompts) - 1]))

    stage.engine.script = script
    episode = await stage.episode()
    assert [(call.name, call.outcome) for call in episode.tool_calls] == [("search", CallOutcome.OK)]
    assert episode.stop_reason is StopReason.ANSWERED
    (row,) = episode.rows
    text = loaded.vocabulary.decode(list(row.token_ids))
    assert text.endswith(
        "<|start|>assistant"
        + ANALYSIS
        + ASKS
        + "<|start|>functions.search to=assistant<|channel|>commentary<|message|>"
        '"found kestrel"<|end|><|start|>assistant' + ANSWERS
    )
    assert list(row.token_ids)[: len(prompts[1])] == list(prompts[1])
    assert episode.final_text == "<think>\nEasy.\n</think>\nThe answer is 4."
    assert episode.messages[1]["content"] == (
        '<think>\nI should look it up.\n</think>\n<tool_call>\n{"name": "search", '
        '"arguments": {"word": "kestrel"}}\n</tool_call>'
    )


def test_a_further_question_after_gpt_oss_has_answered(tmp_path: Path) -> None:
    chat_model = load_model(str(write("gpt-oss", tmp_path)), None, tools=True, started=NOON)
    sampled = chat_model.vocabulary.whole(ANSWERS)
    messages = [Message(role="user", text="2 + 2?"), *ours(chat_model, sampled, []), Message(role="user", text="Sure?")]
    new = chat_model.chat.extension(messages, since=1, last=sampled[-1], tools=NO_TOOLS)
    assert new is not None
    assert chat_model.vocabulary.decode(new) == "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
