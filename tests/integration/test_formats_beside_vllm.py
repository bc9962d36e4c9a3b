"""What our readers of tool calls say of a text, beside what vLLM's own parsers say. No engine is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrl._shared.text.parser import TurnReader
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.engines.vllm import PARSERS
from kestrl.episode import CallOutcome
from kestrl.formats.registry import BUILT_IN

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("formats"),
    pytest.mark.share,
]
SCHEMAS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object"},
        },
    },
    "answer": {"type": "object", "properties": {"text": {"type": "string"}}},
}


def xml(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


TEXTS: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>\n{"name": "search", "arguments": {"word": "a b", "limit": 3}}\n</tool_call>',
        'I look.\n<tool_call>{"name": "search", "arguments": {"word": "é"}}</tool_call>\n'
        '<tool_call>{"name": "answer", "arguments": {"text": "{}"}}</tool_call>',
        "A small falcon.",
    ],
    "llama3_json": [
        '{"name": "search", "parameters": {"word": "a", "where": {"x": [1, {}]}}}',
        '<|python_tag|>{"name": "search", "arguments": {"word": "a"}}',
        '{"name": "search", "parameters": {"word": "a"}}; {"name": "answer", "parameters": {"text": "b"}}',
        'I call {"name": "search", "parameters": {"word": "a"}}',
        "A small falcon.",
        'The set is {"a": 1}.',
    ],
    "mistral": [
        '[TOOL_CALLS]search[ARGS]{"word": "a", "limit": 3}',
        'I look.[TOOL_CALLS]search[ARGS]{"word": "a"}[TOOL_CALLS]answer[ARGS]{"text": "b"}',
        "A small falcon.",
    ],
    "mistral, before v11": [
        '[TOOL_CALLS] [{"name": "search", "arguments": {"word": "a", "limit": 3}}]',
        '[TOOL_CALLS] [{"name": "search", "arguments": {}}, {"name": "answer", "arguments": {"text": "b"}}]',
        "A small falcon.",
    ],
    "qwen_xml": [
        xml("search", word="a b", limit="3", exact="true", tags='["x", "y"]', where='{"x": 1}'),
        "I look.\n" + xml("search", word="two\nlines") + "\n" + xml("answer", text="<b> & 12"),
        xml("search"),
        "A small falcon.",
    ],
    "pythonic": [
        "[search(word='a', limit=3, exact=True, tags=['x'], where={'a': [1]})]",
        '[search(word="a"), answer(text="b")]',
        "A small falcon.",
        "[1, 2]",
    ],
    "harmony": [
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"word": "a"}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.answer "
        '<|constrain|>json<|message|>{"text": "b"}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A small falcon.",
    ],
}
MARKERS = {
    **{name: tuple(dict.fromkeys([*each.markers, *(each.reasoning or ())])) for name, each in BUILT_IN.items()},
    "mistral, before v11": ("[TOOL_CALLS]",),
}


def tokenizer_of(markers: tuple[str, ...]) -> Any:
    """Every byte a token, and the format's markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<eos>", *markers)])
    return tokenizer


def vllm_parsers() -> dict[str, Any]:
    """VLLM's parsers by our names of formats."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
    from vllm.tool_parsers.mistral_tool_parser import MistralToolParser
    from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser
    from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

    return {
        "hermes": Hermes2ProToolParser,
        "llama3_json": Llama3JsonToolParser,
        "mistral": MistralToolParser,
        "mistral, before v11": MistralToolParser,
        "qwen_xml": Qwen3EngineToolParser,
        "pythonic": PythonicToolParser,
    }


def vllm_reads(kind: str, tokenizer: Any, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls by vLLM's parser."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "auto"}
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    parser = vllm_parsers()[kind](wrapped, request.tools)
    found = parser.extract_tool_calls(text, request)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls or ()]
    return (found.content or "").strip(), calls


def test_the_parsers_by_which_a_policy_is_served_are_those_that_were_compared() -> None:
    from vllm.tool_parsers import ToolParserManager

    for kind in BUILT_IN:
        parser = ToolParserManager.get_tool_parser(PARSERS[kind])
        assert kind == "harmony" or parser is vllm_parsers()[kind]


def harmony_reads(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls by OpenAI's own reader of harmony, which vLLM uses."""
    openai_harmony = pytest.importorskip("openai_harmony")
    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    ids = encoding.encode(text, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(ids, openai_harmony.Role.ASSISTANT)
    calls = [
        (message.recipient.removeprefix("functions."), json.loads(message.content[0].text))
        for message in messages
        if message.recipient
    ]
    content = [
        message.content[0].text for message in messages if not message.recipient and message.channel != "analysis"
    ]
    return "\n".join(content), calls


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts])
def test_formats_read_the_same_calls_as_vllm(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(MARKERS[kind])
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()))
    ours = TurnReader(vocabulary, BUILT_IN[kind.partition(",")[0]]).parse(vocabulary.whole(text), SCHEMAS)
    read = (ours.content, [(call.name, call.arguments) for call in ours.calls])
    if kind == "harmony":
        try:
            expected = harmony_reads(text)
        except Exception as error:  # its vocabulary is downloaded when it is first used
            if "vocab" not in str(error).lower() and "download" not in str(error).lower():
                raise
            pytest.skip(f"harmony's vocabulary is not here: {error}")
    else:
        expected = vllm_reads(kind, tokenizer, text)
        if kind == "llama3_json" and expected[1]:
            # vLLM leaves out all text beside calls; we keep it, as every other format does.
            expected = (read[0], expected[1])
    assert read == expected


def test_a_call_without_its_tags_is_an_attempt_where_vllm_reads_an_answer() -> None:
    text = '{"name": "search", "arguments": {}}'
    tokenizer = tokenizer_of(MARKERS["hermes"])
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()))
    (call,) = TurnReader(vocabulary, BUILT_IN["hermes"]).parse(vocabulary.whole(text), SCHEMAS).calls
    assert call.problem is CallOutcome.INVALID_JSON
    assert vllm_reads("hermes", tokenizer, text) == (text, [])
