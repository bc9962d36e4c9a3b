"""The rows that `demo://email/...` gives, read back by the framework's own reader."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from kestrl.data.conversations import read_conversations
from kestrl.data.locate import locate_data
from kestrl.data.rows import load_scenarios
from kestrl.errors import UserInputError
from kestrl_email.commands import email
from kestrl_email.data import TOOLS, provide
from kestrl_email.tools import SearchEmails
from kestrl_email.world import Split, make_tasks


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_carries_the_scope_hidden_from_the_model(tmp_path: Path):
    first, *_ = rows(provide("validation", 3, 42, tmp_path))
    assert set(first) == {"data_source", "prompt", "reward_model", "extra_info"}
    extra, reward = first["extra_info"], first["reward_model"]
    assert isinstance(extra, dict)
    assert isinstance(reward, dict)
    assert set(extra["tools_kwargs"]) == set(TOOLS[""])
    scope = extra["tools_kwargs"]["search_emails"]["create_kwargs"]
    assert Path(scope["database"]).is_absolute()
    assert scope["inbox"] not in json.dumps(first["prompt"])
    tool = SearchEmails(**scope)
    person = json.dumps(first["prompt"])
    assert (
        reward["ground_truth"]["message_id"] in tool([word for word in _words(person) if word[0].isupper()][-1:]).text
    )
    tool.close()


def _words(prompt: str) -> list[str]:
    content = json.loads(prompt)[-1]["content"]
    return [word.strip("?,.") for word in content.split()]


def test_the_framework_reads_what_is_written(tmp_path: Path):
    path = locate_data(
        "demo://email/train", size=7, base=tmp_path, seed=1, cache_dir=tmp_path / "cache", field="spec.data.train"
    )
    scenarios = load_scenarios(path)
    assert [scenario.ordinal for scenario in scenarios] == list(range(7))
    assert set(scenarios[0].tools_kwargs) == set(TOOLS[""])
    assert scenarios[0].ground_truth["message_id"].startswith("m")


def test_the_same_request_gives_the_same_file_untouched(tmp_path: Path):
    path = provide("train", 5, 42, tmp_path)
    written = path.stat().st_mtime_ns
    assert provide("train", 5, 42, tmp_path) == path
    assert path.stat().st_mtime_ns == written
    assert provide("train", 5, 43, tmp_path).read_bytes() != path.read_bytes()
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_a_lost_database_is_made_again(tmp_path: Path):
    path = provide("train", 2, 42, tmp_path)
    path.with_suffix(".db").unlink()
    provide("train", 2, 42, tmp_path)
    assert path.with_suffix(".db").exists()


def test_rows_for_searching_alone_name_no_other_tool(tmp_path: Path):
    whole, searches = rows(provide("train", 3, 42, tmp_path)), rows(provide("train/search", 3, 42, tmp_path))
    assert [item["prompt"] for item in searches] == [item["prompt"] for item in whole]
    assert [list(item["extra_info"]["tools_kwargs"]) for item in searches] == [["search_emails"]] * 3  # type: ignore[index]


def test_conversations_are_rows_of_sft_about_names_of_no_other_split(tmp_path: Path):
    """Every conversation searches, reads and answers, in a form that `kestrl sft` and the tools' schemas accept."""
    path = provide("transcripts", 20, 42, tmp_path)
    asked = {task.question for split in (Split.TRAIN, Split.VALIDATION) for task in make_tasks(split, 500, 42)}
    for conversation in read_conversations(path):
        calls = [call["function"] for message in conversation.messages for call in message.get("tool_calls", ())]
        assert (calls[0]["name"], calls[-1]["name"]) == ("search_emails", "return_final_answer")
        assert "read_email" in [call["name"] for call in calls]
        for call in calls:
            jsonschema.validate(call["arguments"], schema_of(conversation.tools, call["name"]))
        assert conversation.messages[1]["content"] not in asked


def schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    (found,) = [tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name]
    return found


def test_faulty_conversations_answer_wrongly_more_often(tmp_path: Path):
    """The share of conversations whose last call is the right answer with the right source."""
    right = {task.question: task for task in make_tasks(Split.WARM_UP, 200, 42)}

    def correct(path: Path) -> int:
        count = 0
        for conversation in read_conversations(path):
            task = right[conversation.messages[1]["content"]]
            arguments = conversation.messages[-1]["tool_calls"][0]["function"]["arguments"]
            count += arguments == {"answer": task.answer, "sources": [task.message_id]}
        return count

    assert correct(provide("transcripts", 200, 42, tmp_path)) == 200
    assert 10 < correct(provide("transcripts/faulty", 200, 42, tmp_path)) < 120


def test_an_unknown_split_is_reported(tmp_path: Path):
    with pytest.raises(UserInputError, match=r"demo://email/test.*train, train/search, validation.*transcripts/faulty"):
        provide("test", 1, 1, tmp_path)


def test_everything_the_demo_needs_is_made_in_seconds(tmp_path: Path):
    started = time.process_time()
    assert len(rows(provide("train", 4000, 42, tmp_path))) == 4000
    assert len(rows(provide("validation", 120, 42, tmp_path))) == 120
    assert time.process_time() - started < 8


def test_the_command_writes_both_splits(tmp_path: Path):
    result = CliRunner().invoke(email, ["data", "--out", str(tmp_path), "--train", "3", "--validation", "2"])
    assert result.exit_code == 0, result.output
    assert [len(rows(Path(line))) for line in result.output.split()] == [3, 2]


def test_tools_rewards_data_and_commands_are_light():
    code = (
        "import sys, kestrl_email.tools, kestrl_email.rewards, kestrl_email.data, kestrl_email.commands, "
        "kestrl_demo_models.tiny\n"
        "print(*{'torch', 'transformers', 'tokenizers', 'vllm', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
