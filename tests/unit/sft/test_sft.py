"""`kestrl sft` on the demo model: learned tokens, a run that learns and resumes, an adapter that RL starts from."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.spec.status import ResultStatus
from kestrl.data.conversations import Conversation
from kestrl.errors import UserInputError
from kestrl.storage import fetch_adapter, open_store
from kestrl.storage.adapters import WEIGHTS
from kestrl_demo_models.tiny import tiny
from kestrl_email.demonstrations import GOOD, demonstrations
from kestrl_email.transcripts import SCHEMAS
from kestrl_email.transcripts import encode as encode_by_hand
from kestrl_learner.model import adapters
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.sft.__main__ import main
from kestrl_learner.sft.data import load_items, make_encoder
from kestrl_learner.sft.encoding import ConversationEncoder
from kestrl_learner.sft.training import SFTRun, as_group, batches

TOOLS = [{"type": "function", "function": {"name": each.name, "parameters": dict(each.parameters)}} for each in SCHEMAS]


def examples(folder: Path, count: int) -> list[list[dict[str, Any]]]:
    return [[dict(message) for message in made] for made in demonstrations(folder, count, GOOD, 3)]


def as_row(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The demonstrations' calls in the API's form."""
    said = []
    for message in messages:
        calls = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message.get("tool_calls") or []
        ]
        said.append({**message, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})})
    return {"messages": said, "tools": TOOLS}


def manifest(folder: Path, *, name: str = "warm-up", **training: Any) -> Path:
    rows = [as_row(messages) for messages in examples(folder, 24)]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:16]))
    (folder / "held-out.jsonl").write_text("\n".join(json.dumps(row) for row in rows[16:]))
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"base": "demo://tiny", "adapter": {"rank": 4, "alpha": 8}},
            "data": {"train": {"uri": "train.jsonl"}, "validation": {"uri": "held-out.jsonl"}},
            "training": {"batchSize": 4, "epochs": 2, "learningRate": 5e-3, "checkpointEvery": 3} | training,
            "learner": {"threads": 1},
        },
    }
    if training.get("parameters") == "all":
        document["spec"]["model"] = {"base": "demo://tiny"}
    (folder / "sft.yaml").write_text(json.dumps(document))  # JSON is YAML
    return folder / "sft.yaml"


def settings_of(tmp_path: Path, **training: Any) -> SFTSettings:
    """The settings that the command writes, without running the program."""
    from kestrl._app.checks.sft import located
    from kestrl._shared.spec.sft import read_sft_job

    return located(read_sft_job(manifest(tmp_path, **training)), base=tmp_path, folder=tmp_path / "run")


def test_layers_are_compiled_where_the_manifest_says_so(tmp_path: Path) -> None:
    from kestrl._app.checks.sft import located
    from kestrl._shared.spec.sft import read_sft_job

    path = manifest(tmp_path)
    assert not settings_of(tmp_path).pass_options()["compile_layers"]
    job = read_sft_job(path, ("learner.compileLayers=true",))
    assert located(job, base=tmp_path, folder=tmp_path / "run").pass_options()["compile_layers"]


def test_storage_is_waited_for_as_long_as_the_manifest_says(tmp_path: Path) -> None:
    from kestrl._app.checks.sft import located
    from kestrl._shared.spec.sft import read_sft_job

    path = manifest(tmp_path)
    document = json.loads(path.read_text())
    assert settings_of(tmp_path).storage_seconds == 600.0
    document["spec"]["storage"] = {"retryTimeout": "90s"}
    path.write_text(json.dumps(document))
    settings = located(read_sft_job(path), base=tmp_path, folder=tmp_path / "run")
    run = SFTRun(settings)
    assert run._store._patience.seconds == settings.storage_seconds == 90.0


def test_the_learned_tokens_are_those_the_model_writes(tmp_path: Path) -> None:
    """Against the recipe of the demo model, which names each piece by hand."""
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    encoder = make_encoder(str(tiny()), None)
    for messages in examples(tmp_path, 6):
        row = as_row(messages)
        (found,) = encoder.encode(Conversation(messages=row["messages"], tools=TOOLS))
        by_hand = encode_by_hand(tokenizer, messages)
        learned = [token for token, on in zip(found.ids, found.mask, strict=True) if on]
        assert learned == [token for token, on in zip(by_hand.ids, by_hand.learned, strict=True) if on]
        assert found.ids == list(by_hand.ids)[: len(found.ids)]


def with_template(folder: Path, template: str) -> ConversationEncoder:
    """The encoder of the tiny model with another template."""
    path = folder / "template.jinja"
    path.write_text(template)
    return make_encoder(str(tiny()), str(path))


DROPPING = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and not loop.last -%}{{ m.content.split('</think>')[-1] }}"
    "{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def test_a_template_that_drops_reasoning_begins_a_new_row(tmp_path: Path) -> None:
    """As templates that render earlier reasoning once: no token is learned twice, and each behind its prompt."""
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>a</think>first"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>b</think>second"},
    ]
    rows = with_template(tmp_path, DROPPING).encode(Conversation(messages=said, tools=[]))

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    learned = [text([token for token, on in zip(row.ids, row.mask, strict=True) if on]) for row in rows]
    assert learned == ["<think>a</think>first<|im_end|>", "<think>b</think>second<|im_end|>"]
    assert "<think>a" not in text(rows[1].ids)


def test_the_first_token_of_a_conversation_is_not_learned(tmp_path: Path) -> None:
    """The template renders an answer without a prompt: no token predicts the answer's first."""
    plain = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    said = [{"role": "user", "content": ""}, {"role": "assistant", "content": "an answer of several tokens"}]
    (row,) = with_template(tmp_path, plain).encode(Conversation(messages=said, tools=[]))
    assert len(row.ids) > 1
    assert row.mask == [0] + [1] * (len(row.ids) - 1)


PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n@<|im_end|>\n{% endfor %}"
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
ASKED = {"role": "user", "content": "Weather?"}


def called(**arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("template", "said", "message"),
    [
        ("{{ messages | length }}" + PROMPT, [ASKED, {"role": "assistant", "content": "y"}], "leaves out or repeats"),
        (
            TURNS.replace("@", "{{ m.content }}") + PROMPT,
            [ASKED, called(city="Bern")],
            r"tool_calls\[0\].*does not write",
        ),
        (
            TURNS.replace("@", "{{ m.content }}") + PROMPT,
            [ASKED, called()],
            r"messages\[1\].tool_calls.*does not write",
        ),
        (
            TURNS.replace("@", CALLS) + PROMPT,
            [ASKED, {"role": "assistant", "content": "Sun.", "reasoning_content": "Look."}],
            r"messages\[1\].reasoning_content.*does not write",
        ),
        (
            TURNS.replace("@", CALLS) + PROMPT,
            [ASKED, {"role": "assistant", "content": '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'}],
            r"messages\[1\].content: is read as a call",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    template: str, said: Sequence[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    shown = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    with pytest.raises(UserInputError, match=message):
        with_template(tmp_path, shown + template).encode(Conversation(messages=said, tools=tools))


def test_text_that_spells_a_control_token_stays_text(tmp_path: Path) -> None:
    said = [ASKED | {"content": "<|im_end|>"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    (row,) = make_encoder(str(tiny()), None).encode(Conversation(messages=said, tools=[]))
    end = Tokenizer.from_file(str(tiny() / "tokenizer.json")).token_to_id("<|im_end|>")
    assert row.ids.count(end) == 2
    assert row.ids[-1] == end


def test_a_turn_of_weight_0_is_shown_and_not_learned(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    said = [
        ASKED,
        {"role": "assistant", "content": "WRONG", "weight": 0},
        ASKED,
        {"role": "assistant", "content": "right"},
    ]
    (row,) = make_encoder(str(tiny()), None).encode(Conversation(messages=said, tools=[]))
    learned = [token for token, on in zip(row.ids, row.mask, strict=True) if on]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "right<|im_end|>"
    assert "WRONG" in tokenizer.decode(row.ids)


@pytest.mark.parametrize(("size", "last"), [(4, 4), (3, 1)])
def test_batches_hold_every_conversation_once_an_epoch(size: int, last: int) -> None:
    found = batches(5, seed=1, epochs=2, size=size, max_steps=None)
    order = [index for batch in found for index in batch]
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5))
    assert len(found[-1]) == (2 if size == 4 else last)
    assert batches(5, seed=1, epochs=2, size=size, max_steps=1) == found[:1]


@pytest.mark.timeout(180)  # some 10 s on an idle machine: a process of its own that imports torch
def test_the_command_learns_and_rl_can_start_from_its_adapter(tmp_path: Path) -> None:
    path = manifest(tmp_path, epochs=1)
    done = CliRunner().invoke(app, ["sft", str(path), "--runs", str(tmp_path / "runs")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    store = open_store((tmp_path / "runs" / "warm-up-sft" / "store").as_uri())
    summary = json.loads(store.get("summary.json"))
    before, after = (each["loss"] for each in summary["evaluations"])
    assert (summary["status"], summary["steps"]) == ("succeeded", 4)
    assert after < before, (before, after)
    first = json.loads(store.get("metrics/000001.json"))
    assert first["learned_tokens"] < first["tokens"]
    exported = ["export", "warm-up-sft", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "exported")]
    assert CliRunner().invoke(app, exported, catch_exceptions=False).exit_code == 0
    fetched = fetch_adapter(open_store(summary["policy"]["uri"]), tmp_path / "adapter")
    assert (tmp_path / "exported" / WEIGHTS).read_bytes() == (tmp_path / "adapter" / WEIGHTS).read_bytes()
    model = PolicyModel(str(tiny()), dtype="float32", rank=4, alpha=8.0, targets="all-linear", seed=1)
    adapters.load_from(model, summary["policy"]["uri"])
    ids = fetched.probe.token_ids
    assert model.score(ids, adapter=True) == pytest.approx(fetched.probe.logprobs, abs=1e-5)
    other = PolicyModel(str(tiny()), dtype="float32", rank=8, alpha=8.0, targets="all-linear", seed=1)
    with pytest.raises(UserInputError, match=r"spec\.model\.adapter\.from: .* has rank 4"):
        adapters.load_from(other, summary["policy"]["uri"])


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole = settings_of(tmp_path, maxSteps=5)
    straight = SFTRun(whole.model_copy(update={"storage": (tmp_path / "whole").as_uri()})).run()
    asked = iter([False, False, True])
    broken = whole.model_copy(update={"storage": (tmp_path / "broken").as_uri()})
    assert SFTRun(broken, stopping=lambda: next(asked)).run() is None
    again = SFTRun(broken).run()
    assert straight is not None
    assert again is not None
    assert straight.sha256 == again.sha256
    changed = broken.model_copy(update={"seed": 5})
    with pytest.raises(UserInputError, match="another model, data or optimiser"):
        SFTRun(changed).run()


def test_the_loss_is_the_cross_entropy_of_transformers(tmp_path: Path) -> None:
    """The model's own loss on the same labels, conversation by conversation, weighted by their learned tokens."""
    import torch

    settings = settings_of(tmp_path)
    items = load_items(settings, settings.train, "spec.data.train")[:4]
    model = PolicyModel(settings.model, dtype="float32", rank=4, alpha=8.0, targets="all-linear", seed=42)
    total, count = 0.0, 0
    for (row,) in items:
        ids = torch.tensor([list(row.token_ids)])
        labels = torch.where(torch.tensor([list(row.mask)]) > 0, ids, -100)
        with torch.no_grad():
            loss = float(model.peft(input_ids=ids, labels=labels).loss)
        total += loss * sum(row.mask)
        count += sum(row.mask)
    run = SFTRun(settings.model_copy(update={"max_steps": 1}))
    result = run._trainer.step([as_group(items)], 0)  # pyright: ignore[reportPrivateUsage]
    assert result.loss == pytest.approx(total / count, rel=1e-5)


def test_the_program_writes_its_result_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod's last message, from which the operator reads the adapter's address."""
    settings, result = settings_of(tmp_path, maxSteps=1), tmp_path / "result"
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    monkeypatch.setattr("sys.argv", ["sft", "--settings", str(tmp_path / "settings.json"), "--result", str(result)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main() == 0
    found = ResultStatus.model_validate_json(result.read_text())
    summary = json.loads(open_store(settings.storage).get("summary.json"))
    assert found.model_dump() == summary["policy"]


def test_nothing_within_the_limit_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, maxTokens=10)
    with pytest.raises(UserInputError, match=r"spec\.data\.train: none of 16 conversations.*maxTokens \(is 10\)"):
        SFTRun(settings)


def test_stored_episodes_of_a_reward_are_learned_as_they_are(tmp_path: Path) -> None:
    from array import array

    from kestrl.api.common.v1 import common_pb2
    from kestrl.episode import Group, Row, Scenario
    from kestrl.episode.codec import group_to_proto
    from kestrl.testing.attempts import make_attempt

    def episode(reward: float) -> Any:
        from dataclasses import replace

        chance = random.Random(str(reward))
        ids = array("i", [chance.randrange(5, 60) for _ in range(6)])
        row = Row(token_ids=ids, mask=bytes([0, 0, 1, 1, 0, 1]), logprobs=array("f", [0.0] * 6), policies=["p"])
        return replace(make_attempt("x").episode, rows=[row], reward=reward)

    group = Group(
        id="g",
        scenario=Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "?"}]),
        episodes=[episode(reward) for reward in (0.0, 0.9, 1.0)],
    )
    store = open_store((tmp_path / "rl").as_uri())
    store.put("episodes/train/000000.pb", common_pb2.GroupBatch(groups=[group_to_proto(group)]).SerializeToString())
    settings = settings_of(tmp_path)
    data = settings.train.model_copy(update={"path": None, "episodes": (tmp_path / "rl").as_uri(), "min_reward": 0.9})
    items = load_items(settings, data, "spec.data.train")
    assert [list(row.token_ids) for (row,) in items] == [list(each.rows[0].token_ids) for each in group.episodes[1:]]
    assert all(row.mask == bytes([0, 0, 1, 1, 0, 1]) for (row,) in items)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train={}", "spec.data.train: give either uri or episodes"),
        ("data.train.minReward=1", "spec.data.train: minReward selects episodes"),
        ("training.batchsize=3", r"spec.training.batchsize: unknown field; did you mean batchSize\?"),
        ("data.train.uri=nothing.jsonl", "spec.data.train.uri: .*nothing.jsonl does not exist"),
        ("model.adapter.from=relative/path", "spec.model.adapter.from"),
        ("learner.checkpointedLayers=2", "spec.learner.checkpointedLayers: are those of gradient checkpointing"),
        ("learner.activationOffload=true", "spec.learner.activationOffload: moves the inputs of checkpointed layers"),
        ("learner={activationOffload: true, gradientCheckpointing: true}", "saves nothing on a CPU"),
        (
            "learner={accelerator: {count: 2}, device: 'cuda:1'}",
            "spec.learner.device: 'cuda:1' is one device, and spec.learner.accelerator.count is 2: use 'cuda'",
        ),
        ("learner.replicas=2", "spec.learner.replicas: unknown field"),
        ("template=none.jinja", "spec.template: .*none.jinja does not exist"),
    ],
)
def test_a_bad_manifest_is_refused_by_its_field(tmp_path: Path, override: str, message: str) -> None:
    path = manifest(tmp_path)
    done = CliRunner().invoke(app, ["sft", str(path), "--set", override, "--runs", str(tmp_path / "runs")])
    assert isinstance(done.exception, UserInputError)
    assert re.search(message, str(done.exception))


def test_the_settings_survive_their_file(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    assert read_settings(SFTSettings, tmp_path / "settings.json") == settings
