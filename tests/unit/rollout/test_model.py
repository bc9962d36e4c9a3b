"""Loading tokenizer and template: what is used, what is refused, and with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kestrl.errors import UserInputError
from kestrl_rollout.model import load_model
from kestrl_rollout.vocabulary import Vocabulary

NOW = datetime(2026, 1, 2).astimezone()
WriteModel = Callable[..., Path]


def load(folder: Path | str, template: str | None = None, *, tools: bool = True) -> Any:
    return load_model(str(folder), template, tools=tools, started=NOW)


def test_a_folder(model_folder: Path) -> None:
    face = load(model_folder)
    assert face.vocabulary.control("<|im_end|>") == 258
    assert (face.stop_ids, face.eos_id, face.pad_id) == ((258,), 258, 256)


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
    ("spoil", "told"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "not readable"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"), "leaves out"),
    ],
)
def test_what_is_wrong_with_a_folder(write_model: WriteModel, spoil: Callable[[Path], Any], told: str) -> None:
    folder = write_model()
    spoil(folder)
    with pytest.raises(UserInputError, match=told):
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
    with pytest.raises(UserInputError, match="nothing ends a turn"):
        load(folder, tools=False)


def test_a_template_that_rewrites_history_after_a_tool_result(write_model: WriteModel) -> None:
    folder = write_model(
        template="{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(UserInputError, match="with a tool's result"):
        load(folder)
    load(folder, tools=False)


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
