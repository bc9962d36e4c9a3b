"""Generated arithmetic, through `kestrl data` and back through the readers of rows and of conversations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.tasks import arithmetic
from kestrl._app.tasks.arithmetic import problems, rows, transcripts
from kestrl.data import load_scenarios, locate_data
from kestrl.data.conversations import Conversation, conversation, read_conversations
from kestrl.errors import UserInputError
from kestrl_sandbox.tool import PythonInterpreter


def kestrl(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["data", "arithmetic", *map(str, arguments)])
    if isinstance(done.exception, UserInputError):
        return str(done.exception)
    assert done.exception is None, done.output
    return done.output


def called_code(read: Conversation) -> str:
    code: str = read.messages[1]["tool_calls"][0]["function"]["arguments"]["code"]
    return code


def printed_by(code: str) -> str:
    """Python's own value of what the program prints."""
    return str(eval(code.removeprefix("print(").removesuffix(")")))


def test_answers_are_pythons_and_questions_name_the_problem() -> None:
    for problem in problems("train", seed=7, size=500):
        assert eval(problem.expression) == problem.answer
        assert problem.question == f"What is {problem.expression}?"


def test_splits_of_all_seeds_share_no_problem_and_a_size_changes_no_row() -> None:
    def drawn(split: str, seed: int) -> set[str]:
        return {problem.expression for problem in problems(split, seed=seed, size=300)}

    assert not (drawn("train", 1) | drawn("train", 2)) & (drawn("validation", 1) | drawn("validation", 3))
    assert drawn("train", 1) != drawn("train", 2)
    assert rows("train", seed=3, size=50) == rows("train", seed=3, size=200)[:50]


def test_rows_are_read_as_scenarios_of_the_jobs_own_loop(tmp_path: Path) -> None:
    assert "20 rows" in kestrl("--size", "20", "--split", "validation", "--out", tmp_path / "rows.parquet")
    scenarios = load_scenarios(tmp_path / "rows.parquet")
    assert scenarios[3].id == "kestrl/arithmetic/3"
    assert {scenario.agent for scenario in scenarios} == {""}
    for scenario in scenarios:
        assert str(eval(scenario.metadata["expression"])) == scenario.ground_truth
        assert scenario.metadata["split"] == "validation"


def test_transcripts_call_the_tool_that_the_job_offers(tmp_path: Path) -> None:
    """Name and parameters differ in nothing, or the model would be trained on calls that its job refuses."""
    kestrl("--transcripts", "--size", "30", "--out", tmp_path / "transcripts.jsonl")
    (definition,) = asyncio.run(PythonInterpreter("code_interpreter", {}).list_tools())
    offered = definition.schema.to_openai()["function"]
    for read in read_conversations(tmp_path / "transcripts.jsonl"):
        assert [message["role"] for message in read.messages] == ["user", "assistant", "tool", "assistant"]
        (tool,) = read.tools
        assert tool["function"]["name"] == offered["name"]
        assert tool["function"]["description"] == offered["description"]
        assert tool["function"]["parameters"]["properties"] == offered["parameters"]["properties"]
        assert tool["function"]["parameters"]["required"] == offered["parameters"]["required"]
        result = printed_by(called_code(read))
        assert read.messages[2]["content"] == result
        assert read.messages[3]["content"] == rf"\boxed{{{result}}}"


def test_transcripts_err_as_often_as_asked() -> None:
    made: list[dict[str, Any]] = transcripts("train", seed=5, size=400, mistakes=0.3)
    wrong = 0
    for row, problem in zip(made, problems("train", seed=5, size=400), strict=True):
        read = conversation(row)
        assert read.messages[0]["content"] == problem.question
        assert read.messages[2]["content"] == printed_by(called_code(read))
        wrong += called_code(read) != f"print({problem.expression})"
    assert 0.2 < wrong / 400 < 0.4
    assert all(called_code(conversation(row)) in str(row) for row in transcripts("train", seed=5, size=5))


def test_impossible_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    assert "'test' is not one of train, validation" in kestrl("--split", "test", "--out", out)
    assert "--mistakes: is the share of mistaken transcripts" in kestrl("--mistakes", "0.5", "--out", out)
    monkeypatch.setattr(arithmetic, "LARGEST", 4)
    assert "there are not 5000 different problems" in kestrl("--size", "5000", "--out", out)
    assert not out.exists()


def test_a_manifest_names_generated_arithmetic(tmp_path: Path) -> None:
    def located(path: str) -> Path:
        uri = f"demo://arithmetic/{path}"
        return locate_data(uri, size=8, base=tmp_path, seed=1, cache_dir=tmp_path, field="spec.data.train.uri")

    assert len(load_scenarios(located("validation"))) == 8
    assert len(read_conversations(located("transcripts/25"))) == 8
    for path in ("test", "transcripts", "transcripts/101", "train/5"):
        with pytest.raises(UserInputError, match="give train, validation, or transcripts/PERCENT"):
            located(path)
