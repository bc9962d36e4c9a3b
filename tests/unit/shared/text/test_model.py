"""Loading tokenizer and template: what is used, what is refused, and with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import load_model, verify_start, verify_template
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.errors import UserInputError

NOW = datetime(2026, 1, 2).astimezone()
WriteModel = Callable[..., Path]


def load(folder: Path | str, template: str | None = None, *, tools: bool = True) -> Any:
    return load_model(str(folder), template, tools=tools, started=NOW)


def test_a_folder(model_folder: Path) -> None:
    chat_model = load(model_folder)
    assert chat_model.vocabulary.control("<|im_end|>") == 258
    assert (chat_model.stop_ids, chat_model.eos_id, chat_model.pad_id) == ((258,), 258, 256)


def test_a_turn_ends_with_whatever_any_source_names(write_model: WriteModel) -> None:
    folder = write_model(config={"eos_token": "<|endoftext|>"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    assert load(folder).stop_ids == (256, 257, 258)
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    assert load(folder).stop_ids == (257, 256, 258)


def test_the_template_may_come_from_the_tokenizers_configuration(write_model: WriteModel) -> None:
    folder = write_model()
    source = (folder / "chat_template.jinja").read_text()
    named = write_model(
        template=None,
        config={"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": source}]},
    )
    assert load(named).stop_ids == (258,)
    assert load(write_model(template=None, config={"chat_template": source})).stop_ids == (258,)


def test_a_template_of_the_jobs_own(write_model: WriteModel, model_folder: Path) -> None:
    folder = write_model(template="broken {% if")
    load(folder, str(model_folder / "chat_template.jinja"))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "not readable"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"), "leaves out"),
    ],
)
def test_an_invalid_model_folder_is_refused_with_the_reason(
    write_model: WriteModel, spoil: Callable[[Path], Any], expected: str
) -> None:
    folder = write_model()
    spoil(folder)
    with pytest.raises(UserInputError, match=expected):
        load(folder)


def test_a_folder_or_template_that_does_not_exist(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UserInputError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserInputError, match=r"agent\.template"):
        load(model_folder, str(tmp_path / "none.jinja"))


def test_a_hugging_face_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        if repo == "no/model":
            raise OSError("404")
        return str(model_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("some/model").stop_ids == (258,)
    assert "tokenizer.json" in asked[0][1]["allow_patterns"]
    with pytest.raises(UserInputError, match="cannot download 'no/model'"):
        load("no/model")


def test_without_the_hub_an_id_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserInputError, match="huggingface_hub is not installed"):
        load("some/model")


def test_nothing_ends_a_turn(write_model: WriteModel) -> None:
    folder = write_model(template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", config={})
    with pytest.raises(UserInputError, match="no token ends a turn"):
        load(folder, tools=False)


def test_a_template_that_rewrites_history_after_a_tool_result(write_model: WriteModel) -> None:
    folder = write_model(
        template="{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert verify_template(load(folder).chat, tools=True).forks
    assert not verify_template(load(folder, tools=False).chat, tools=False).forks


GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
"""Gemma-2's published template."""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"""
"""Mistral-7B-Instruct-v0.1's."""
USER = [Message(role="user", text="Who?")]
SYSTEM = [Message(role="system", text="Be brief."), *USER]


@pytest.mark.parametrize("template", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_a_template_without_a_system_role_serves_data_without_one(write_model: WriteModel, template: str) -> None:
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    folder = write_model(template=template, config=names)
    chat_model = load(folder, tools=False)
    verify_start(chat_model.chat, USER, NO_TOOLS)
    with pytest.raises(UserInputError, match=r"refuses the conversation: (System role|Conversation roles)"):
        verify_start(chat_model.chat, SYSTEM, NO_TOOLS)
    with pytest.raises(UserInputError, match=r"has no place for a tool's result .* leave out spec.tools"):
        load(folder, tools=True)


def bpe(words: list[str], merges: list[str], added: list[tuple[str, bool]]) -> dict[str, Any]:
    """A tokenizer like Gemma's: added tokens stand in the vocabulary, and merges may make them."""
    vocab = {word: number for number, word in enumerate(words)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocab[text], "content": text, "special": special} | flags for text, special in added],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


LETTERS = [*"<ab>\n"]


def test_control_tokens_that_merges_make_are_no_longer_made() -> None:
    words = [*LETTERS, "<a", "<a>", "<a>b"]
    vocabulary = Vocabulary(bpe(words, ["< a", "<a >", "<a> b"], [("<a>", True)]))
    assert vocabulary.whole("<a>") == [6]
    assert vocabulary.content("<a>b") == [5, 3, 2]
    assert vocabulary.structure("x<a>") == ("x", 6)


def test_white_space_that_is_an_added_token_is_text() -> None:
    words = [*LETTERS, "\n\n", "\n\n\n"]
    data = bpe(words, ["\n \n"], [("\n\n", False), ("\n\n\n", False), ("<", True)])
    data["model"]["vocab"]["<"] = 0
    vocabulary = Vocabulary(data)
    assert vocabulary.control_ids == {0}
    assert list(vocabulary.content("a\n\n\nb\n\n")) == [1, 6, 2, 5] == vocabulary.whole("a\n\n\nb\n\n")


def test_a_control_token_of_the_alphabet_is_refused_by_name() -> None:
    data = bpe([*LETTERS, "ab"], ["a b"], [("a", True)])
    with pytest.raises(UserInputError, match=r"the text 'a' as a control token .* could forge it"):
        Vocabulary(data)


def test_a_damaged_tokenizer_is_one_error() -> None:
    with pytest.raises(UserInputError, match=r"model.base: tokenizer.json cannot be used"):
        Vocabulary(bpe(LETTERS, ["a zz"], []))


def test_a_tokenizer_whose_pieces_depend_on_their_place(write_model: WriteModel) -> None:
    folder = write_model()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "Replace", "pattern": {"Regex": "^system"}, "content": "a"}
    data["added_tokens"] = [each | {"normalized": True} for each in data["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserInputError, match="encodes a text differently when cut"):
        load(folder)


def test_a_vocabulary_that_would_look_control_strings_up_whole(model_folder: Path) -> None:
    data = json.loads((model_folder / "tokenizer.json").read_text())
    data["pre_tokenizer"] = None
    data["model"]["ignore_merges"] = True
    data["model"]["vocab"] |= {each["content"]: each["id"] for each in data["added_tokens"]}
    vocabulary = Vocabulary(data)
    assert vocabulary.control_ids.isdisjoint(vocabulary.content("<|im_end|>"))
    assert vocabulary.whole("<|im_end|>") == [258]


def test_a_vocabulary_that_cannot_be_made_safe(model_folder: Path) -> None:
    data = json.loads((model_folder / "tokenizer.json").read_text())
    data["added_tokens"] = [
        {"id": 65, "content": data_letter(data, 65), "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
    ]
    data["model"]["unk_token"] = data_letter(data, 65)
    with pytest.raises(UserInputError, match="could forge it"):
        Vocabulary(data)


def data_letter(data: dict[str, Any], token: int) -> str:
    return next(text for text, each in data["model"]["vocab"].items() if each == token)
