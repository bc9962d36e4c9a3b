"""What our readers of tool calls say of a text, beside what vLLM's own parsers say. No engine is started."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.engines.interpreter import engine_python
from kestrl._app.engines.variables import engine_environment
from kestrl._shared.spec.inference import Inference
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
UNTAGGED = '{"name": "search", "arguments": {}}'
ASKED = [(kind, text) for kind, texts in (*TEXTS.items(), ("hermes", [UNTAGGED])) for text in texts]
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


@dataclass(frozen=True)
class Read:
    """What vLLM reads in a text."""

    content: str
    calls: list[tuple[str, Any]]
    unavailable: str = ""
    """Why it cannot read it here."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's interpreter answers, asked once for all texts."""
    work = tmp_path_factory.mktemp("formats")
    tokenizers = {kind: json.loads(tokenizer_of(markers).to_str()) for kind, markers in MARKERS.items()}
    texts = {"tokenizers": tokenizers, "texts": ASKED, "schemas": SCHEMAS, "parsers": PARSERS}
    (work / "texts.json").write_text(json.dumps(texts))
    python = engine_python(Inference(), work)
    assert python is not None
    command = [python, Path(__file__).parent / "inside_vllm" / "reading.py", work / "texts.json", work / "read.json"]
    ended = subprocess.run(
        command, env=engine_environment(os.environ, python), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((work / "read.json").read_text())


@pytest.fixture(scope="module")
def by_vllm(answers: dict[str, Any]) -> dict[tuple[str, str], Read]:
    reads = [Read(content, [(name, values) for name, values in calls], why) for content, calls, why in answers["reads"]]
    return dict(zip(ASKED, reads, strict=True))


def test_the_parsers_by_which_a_policy_is_served_are_those_that_were_compared(answers: dict[str, Any]) -> None:
    assert answers["compared"] == dict.fromkeys(BUILT_IN.keys() - {"harmony"}, True)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts])
def test_formats_read_the_same_calls_as_vllm(kind: str, text: str, by_vllm: dict[tuple[str, str], Read]) -> None:
    tokenizer = tokenizer_of(MARKERS[kind])
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()))
    ours = TurnReader(vocabulary, BUILT_IN[kind.partition(",")[0]]).parse(vocabulary.whole(text), SCHEMAS)
    read = (ours.content, [(call.name, call.arguments) for call in ours.calls])
    theirs = by_vllm[kind, text]
    if theirs.unavailable:
        pytest.skip(theirs.unavailable)
    expected = (theirs.content, theirs.calls)
    if kind == "llama3_json" and theirs.calls:
        # vLLM leaves out all text beside calls; we keep it, as every other format does.
        expected = (read[0], theirs.calls)
    assert read == expected


def test_a_call_without_its_tags_is_an_attempt_where_vllm_reads_an_answer(
    by_vllm: dict[tuple[str, str], Read],
) -> None:
    vocabulary = Vocabulary(json.loads(tokenizer_of(MARKERS["hermes"]).to_str()))
    (call,) = TurnReader(vocabulary, BUILT_IN["hermes"]).parse(vocabulary.whole(UNTAGGED), SCHEMAS).calls
    assert call.problem is CallOutcome.INVALID_JSON
    assert by_vllm["hermes", UNTAGGED] == Read(UNTAGGED, [])
