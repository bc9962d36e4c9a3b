"""Small chat models: a byte tokenizer with our own template, and the published templates beside the checkout."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kestrl._shared.text.chat_model import ChatModel, load_model
from kestrl._shared.text.vocabulary import Vocabulary

DATA = Path(__file__).parents[1] / "data"
NOT_HERE = "the published templates of Qwen2.5 to Qwen3.6 (shared/data/chat_templates beside the checkout)"
SHARED_TEMPLATES = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"

OWN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}
    {{- 'Tools, one JSON object a line:\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
    {{- 'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def byte_tokenizer(*, markers: bool = True) -> Tokenizer:
    """Every byte a token, and the control tokens of ChatML; without `markers` tool calls are mere text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    if markers:
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return tokenizer


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model folder: tokenizer, template, configuration."""

    def write(
        *, template: str | None = OWN_TEMPLATE, markers: bool = True, config: dict[str, Any] | None = None
    ) -> Path:
        folder = tmp_path_factory.mktemp("model")
        byte_tokenizer(markers=markers).save(str(folder / "tokenizer.json"))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}} if config is None else config
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def model_folder(write_model: Callable[..., Path]) -> Path:
    return write_model()


@pytest.fixture(scope="session")
def load(write_model: Callable[..., Path]) -> Callable[..., ChatModel]:
    """Loads a small model as the worker would."""

    def loaded(*, tools: bool = True, **options: Any) -> ChatModel:
        return load_model(str(write_model(**options)), None, tools=tools, started=datetime(2026, 1, 2).astimezone())

    return loaded


@pytest.fixture(scope="session")
def chat_model(load: Callable[..., ChatModel]) -> ChatModel:
    return load()


@pytest.fixture(scope="session")
def forgetful_template() -> str:
    """Deletes reasoning once the user speaks again, as Qwen3's does."""
    return OWN_TEMPLATE.replace(
        "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}",
        "{%- if loop.nextitem and loop.nextitem.role == 'user' %}{{- message.content.split('</think>')[-1].lstrip() }}"
        "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>' }}",
    )


@pytest.fixture(scope="session")
def qwen() -> Vocabulary:
    """The real tokenizer of Qwen3."""
    packed = (DATA / "qwen_tokenizer" / "tokenizer.json.xz").read_bytes()
    return Vocabulary(json.loads(lzma.decompress(packed)))


def templates() -> list[Any]:
    """Our own template, and the published ones wherever they lie beside the checkout."""
    found = sorted(SHARED_TEMPLATES.glob("*.jinja"))
    return [
        pytest.param(OWN_TEMPLATE, id="own"),
        *(pytest.param(path.read_text(encoding="utf-8"), id=path.stem) for path in found),
        *([] if found else [pytest.param("", id="published", marks=pytest.mark.skip(f"{NOT_HERE} are not here"))]),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_template" in metafunc.fixturenames:
        metafunc.parametrize("any_template", templates(), scope="session")
