"""The shipped checkpoint, and the recipe that made it."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kestrl.data.locate import locate_model
from kestrl.tools import ToolError
from kestrl_demo_models.tiny import tiny
from kestrl_email import demonstrations as demos
from kestrl_email import transcripts
from kestrl_email.tools import DONT_KNOW
from kestrl_email.world import Split, make_tasks, split_of, write_database

MODEL = tiny()
OPENAI_TOOLS = [schema.to_openai() for schema in transcripts.SCHEMAS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[demos.Messages]:
    return list(demos.demonstrations(tmp_path_factory.mktemp("demonstrations"), 200, demos.FAULTY, 3))


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL / "chat_template.jinja").read_text()).render(messages=messages, **options)


def text_of(messages: demos.Messages) -> str:
    return "".join(text for text, _ in transcripts.segments(messages))


def test_the_checkpoint_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(files.values()) < 6_000_000
    assert locate_model("demo://tiny", base=Path()) == str(MODEL)


def test_the_checkpoint_has_the_shape_that_engines_take(tokenizer: Tokenizer):
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 32
    assert config["vocab_size"] >= tokenizer.get_vocab_size()
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>")]
    assert "temperature" not in generation


def test_the_weights_are_bfloat16():
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"} == {"BF16"}


def test_turn_tokens_are_special_and_call_markers_are_not():
    added = json.loads((MODEL / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {
        **dict.fromkeys(transcripts.SPECIAL, True),
        **dict.fromkeys(transcripts.MARKERS, False),
    }


def test_the_shipped_template_is_the_sources_template():
    assert (MODEL / "chat_template.jinja").read_text() == transcripts.TEMPLATE


def test_the_template_renders_what_the_warm_up_taught(conversations: list[demos.Messages]):
    for messages in conversations[:20]:
        assert render(messages, tools=OPENAI_TOOLS) == text_of(messages) + "\n"


def test_the_template_renders_exactly():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "read_email", "arguments": {"message_id": "m1"}}}],
        },
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    assert render(messages, tools=OPENAI_TOOLS, add_generation_prompt=True) == (
        "<|im_start|>system\nS\nTools:\n"
        "search_emails(keywords, from_addr, to_addr, sent_after, sent_before, max_results)\n"
        "read_email(message_id)\n"
        "return_final_answer(answer, sources)<|im_end|>\n"
        "<|im_start|>user\nQ<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "read_email", "arguments": '
        '{"message_id": "m1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_template_only_ever_appends(conversations: list[demos.Messages]):
    messages = conversations[0]
    for end in range(2, len(messages) + 1):
        before, after = messages[: end - 1], messages[:end]
        assert render(after, tools=OPENAI_TOOLS).startswith(render(before, tools=OPENAI_TOOLS))


def test_a_word_is_the_same_tokens_everywhere(tokenizer: Tokenizer):
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    for task in make_tasks(Split.VALIDATION, 50, 9):
        name = ids(task.person)
        for around in ("Does {} meet?", '{{"keywords": ["{}", "x"]}}', "{}@acme.example", '"snippet": "{}: topic"'):
            written = ids(around.format(task.person))
            assert any(written[start : start + len(name)] == name for start in range(len(written)))


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer):
    rng = random.Random(1)
    texts = ["", "é\n\t ", "日本語 🙂", '{"a": [1, "b"]}', "  two  spaces  ", "x" * 500]
    texts += ["".join(chr(rng.randrange(1, 0x2000)) for _ in range(40)) for _ in range(50)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_a_prompt_and_an_episode_are_short(tokenizer: Tokenizer, conversations: list[demos.Messages]):
    prompts = [len(transcripts.encode(tokenizer, messages[:2]).ids) for messages in conversations]
    whole = [len(transcripts.encode(tokenizer, messages).ids) for messages in conversations]
    assert max(prompts) <= 120
    assert sum(whole) / len(whole) <= 320
    assert max(whole) <= 500


def test_a_rollout_splits_conversations_as_the_warm_up(tokenizer: Tokenizer, conversations: list[demos.Messages]):
    from kestrl._shared.text.chat import Message
    from kestrl._shared.text.chat_model import load_model

    chat_model = load_model(str(MODEL), None, tools=True, started=datetime.now(UTC))
    toolset = chat_model.chat.toolset(OPENAI_TOOLS)
    for messages in conversations:
        ids = chat_model.chat.prompt(
            [Message(role=said["role"], text=said["content"]) for said in messages[:2]], toolset
        )
        said = [Message(role=message["role"], text=message["content"]) for message in messages[:2]]
        for message in messages[2:]:
            if message["role"] == "assistant":
                text = "".join(transcripts.call_text(call) for call in message["tool_calls"]) + transcripts.END
                ids += tokenizer.encode(text, add_special_tokens=False).ids
                said.append(Message(role="assistant", text=text))
            else:
                said.append(Message(role="tool", text=message["content"]))
                new = chat_model.chat.extension(said, since=len(said) - 2, last=ids[-1], tools=toolset)
                assert new is not None
                ids += new
        assert ids == transcripts.encode(tokenizer, messages).ids


def test_only_the_models_text_is_learned(tokenizer: Tokenizer, conversations: list[demos.Messages]):
    example = transcripts.encode(tokenizer, conversations[0])
    learned = [token for token, wanted in zip(example.ids, example.learned, strict=True) if wanted]
    text = tokenizer.decode(learned, skip_special_tokens=False)
    calls = [call for message in conversations[0] for call in message.get("tool_calls", ())]
    assert text == "".join(transcripts.call_text(call) + transcripts.END for call in calls)


def test_a_drill_repeats_a_run_of_ordinary_tokens(tokenizer: Tokenizer):
    for seed in range(20):
        example = transcripts.drill(tokenizer, random.Random(seed))
        size = len(example.ids) // 3
        assert example.ids == example.ids[:size] * 3
        assert sum(example.learned) == 2 * size
        assert all(
            token not in (*transcripts.SPECIAL, *transcripts.MARKERS)
            for token in map(tokenizer.id_to_token, example.ids)
        )


def test_a_good_demonstrator_answers_right_and_cites(tmp_path: Path):
    tasks = list(make_tasks(Split.WARM_UP, 30, 5))
    for task, messages in zip(tasks, demos.demonstrations(tmp_path, 30, demos.GOOD, 5), strict=True):
        final = messages[-1]["tool_calls"][0]
        assert final["arguments"] == {"answer": task.answer, "sources": [task.message_id]}


def test_a_faulty_demonstrator_errs_in_every_way_and_is_often_right(conversations: list[demos.Messages]):
    tasks = list(make_tasks(Split.WARM_UP, 200, 3))
    finals = [messages[-1]["tool_calls"][0]["arguments"] for messages in conversations]
    right = [
        final == {"answer": task.answer, "sources": [task.message_id]}
        for task, final in zip(tasks, finals, strict=True)
    ]
    assert 0.15 < sum(right) / len(right) < 0.5
    assert any(final["answer"] == DONT_KNOW for final in finals)
    assert any(final["sources"] == [] and final["answer"] != DONT_KNOW for final in finals)


def test_demonstrations_use_warm_up_names_only(tmp_path: Path):
    for messages in demos.demonstrations(tmp_path, 30, demos.FAULTY, 6):
        keywords = messages[2]["tool_calls"][0]["arguments"]["keywords"]
        assert {split_of(keyword) for keyword in keywords} == {Split.WARM_UP}


def test_a_demonstrator_never_causes_a_tool_failure(tmp_path: Path):
    tasks = list(make_tasks(Split.WARM_UP, 20, 8))
    write_database(tmp_path / "mails.db", tasks)
    clumsy = demos.Habits(both_keywords=0, matching_mail=0, second_look=0, right_attribute=0, right_source=0, give_up=0)
    demonstrator = demos.Demonstrator(tmp_path / "mails.db", clumsy, random.Random(1))
    for task in tasks:
        try:
            demonstrator.play(task)
        except ToolError as error:
            pytest.fail(str(error))


# Two threads wait busily for each other in each of thousands of small operations, which beside other programs takes
# several times their work.
SMALL = {"batch": 4, "hidden": 64, "layers": 2, "threads": 1}


@pytest.mark.slow
def test_the_recipe_shortened_is_deterministic(tmp_path: Path):
    from kestrl_email.demo_model import Recipe, build

    recipe = Recipe(steps=10, drills=8, conversations=60, vocabulary=400, **SMALL)
    digests: list[dict[str, str]] = []
    for name in ("first", "second"):
        build(tmp_path / name, recipe)
        digests.append(
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        )
    assert digests[0] == digests[1]
    assert set(digests[0]) >= {path.name for path in MODEL.iterdir()} - {"README.md"}


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from kestrl_email.demo_model import Recipe, build

    caplog.set_level("INFO", "kestrl_email")
    build(tmp_path / "model", Recipe(steps=41, drills=4, drills_until=0.0, conversations=100, **SMALL))
    losses = [float(record.getMessage().split()[3]) for record in caplog.records if record.message.startswith("step")]
    assert losses[-1] < losses[0] / 2
