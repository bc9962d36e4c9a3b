"""GSM8K in verl's form and generated word problems, through `kestrl data` and back through the reader of data sets."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.tasks import word_problems
from kestrl._app.tasks.gsm8k import MathTool, read_gsm8k
from kestrl._app.tasks.word_problems import NAMES, Form, generated, problems
from kestrl.data import load_scenarios, locate_data
from kestrl.data.conversations import read_conversations
from kestrl.errors import UserInputError

SOLD = {"question": "She sold 48 clips and then half as many?", "answer": "48/2 = <<48/2=24>>24\n48+24=72\n#### 72"}
RICH = {"question": "How much is 500 twice?", "answer": "500*2 = <<500*2=1000>>1000\n#### 1,000"}
DEBT = {"question": "What is 1 - 3.5?", "answer": "#### -2.5"}


def kestrl(*arguments: str | Path, code: int = 0) -> str:
    """What a command prints; with code 2 its error of the input."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if code:
        assert isinstance(done.exception, UserInputError), done.output
        return str(done.exception)
    assert done.exception is None, done.output
    return done.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (SOLD, RICH, DEBT)))
    return path


def test_no_oracle_is_offered_unless_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    kestrl("data", "gsm8k", "--source", source, "--out", tmp_path / "out.jsonl")
    first, *_ = load_scenarios(tmp_path / "out.jsonl")
    assert "`calculator`" in first.messages[0]["content"]
    assert not first.tools_kwargs


def test_gsm8k_becomes_verls_rows(source: Path, tmp_path: Path) -> None:
    oracle = ("--tool", "calc_gsm8k_reward")
    assert "3 rows" in kestrl("data", "gsm8k", "--source", source, *oracle, "--out", tmp_path / "out.jsonl")
    first, second, third = load_scenarios(tmp_path / "out.jsonl")
    assert first.id == "openai/gsm8k/0"
    assert [each.ground_truth for each in (first, second, third)] == ["72", "1000", "-2.5"]
    assert first.agent == ""  # the job's own loop, which may be an agent outside of the worker
    assert second.tools_kwargs["calc_gsm8k_reward"]["create_kwargs"] == {"ground_truth": "1000"}
    assert "at least once" in first.messages[0]["content"]
    asked = f"{SOLD['question']} Let's think step by step and output the final answer after `####`."
    assert first.messages[1] == {"role": "user", "content": asked}
    assert first.metadata["answer"] == SOLD["answer"]
    assert first.metadata["interaction_kwargs"] == {"query": asked, "ground_truth": "72"}


@pytest.mark.parametrize("tool", list(MathTool))
def test_parquet_and_jsonl_hold_the_same_rows(source: Path, tmp_path: Path, tool: MathTool) -> None:
    for suffix in ("jsonl", "parquet"):
        kestrl("data", "gsm8k", "--source", source, "--tool", tool, "--out", tmp_path / f"out.{suffix}")
    assert load_scenarios(tmp_path / "out.parquet") == load_scenarios(tmp_path / "out.jsonl")


def test_gsm8k_of_hugging_face_is_parquet(source: Path, tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([SOLD, RICH, DEBT]), tmp_path / "hf.parquet")
    assert read_gsm8k(tmp_path / "hf.parquet", split="train", tool=MathTool.CALCULATOR) == read_gsm8k(
        source, split="train", tool=MathTool.CALCULATOR
    )


def test_two_files_split_a_source_without_a_shared_row(source: Path, tmp_path: Path) -> None:
    kestrl("data", "gsm8k", "--source", source, "--skip", "1", "--out", tmp_path / "rest.jsonl")
    kestrl("data", "gsm8k", "--source", source, "--size", "1", "--split", "held-out", "--out", tmp_path / "test.jsonl")
    train, held_out = (load_scenarios(tmp_path / name) for name in ("rest.jsonl", "test.jsonl"))
    assert [each.id for each in train] == ["openai/gsm8k/1", "openai/gsm8k/2"]
    assert [each.id for each in held_out] == ["openai/gsm8k/0"]
    assert held_out[0].metadata["split"] == "held-out"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Why?"}, "bad.jsonl:2: answer: must be text"),
        ({"question": "Why?", "answer": "because"}, "bad.jsonl:2: answer: has no final answer '#### NUMBER'"),
        ({"question": 3, "answer": "#### 3"}, "bad.jsonl:2: question: must be text"),
        (["Why?"], "bad.jsonl:2: question: must be text"),
    ],
)
def test_a_row_that_is_not_gsm8ks_is_refused_by_line(row: Any, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{json.dumps(SOLD)}\n{json.dumps(row)}\n")
    printed = kestrl("data", "gsm8k", "--source", bad, "--out", tmp_path / "out.jsonl", code=2)
    assert message in printed
    assert not (tmp_path / "out.jsonl").exists()


def test_impossible_requests_are_refused(source: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--out", tmp_path / "out.csv"), "must end in .jsonl or .parquet"),
        (("--out", tmp_path / "out.jsonl", "--size", "4"), "holds 3 rows"),
        (("--out", tmp_path / "out.jsonl", "--skip", "3"), "holds 0 rows"),
    ):
        assert message in kestrl("data", "gsm8k", "--source", source, *arguments, code=2)
    with pytest.raises(UserInputError, match="not one of train, validation"):
        problems("test", 1, 3)


def test_more_problems_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_problems, "TEMPLATES", word_problems.TEMPLATES[-1:])
    with pytest.raises(UserInputError, match="not 5000 different problems"):
        problems("validation", 1, 5000)


def value_of(expression: str) -> Fraction:
    """Python's own arithmetic, on exact numbers."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})


def test_generated_problems_are_solved_by_their_own_numbers() -> None:
    for problem in problems("train", 7, 400):
        assert value_of(problem.expression) == problem.answer > 0
        for expression, result in problem.steps:
            assert value_of(expression) == result
            assert f"<<{expression}={result}>>" in problem.worked
        in_text = set(re.findall(r"\d+", problem.question)) | {"2"}
        assert set(re.findall(r"\d+", problem.expression)) <= in_text, problem


def test_splits_share_no_question_and_a_size_changes_no_row() -> None:
    assert not set(NAMES["train"]) & set(NAMES["validation"])
    assert problems("train", 3, 50) == problems("train", 3, 200)[:50]
    assert problems("train", 3, 50) != problems("train", 4, 50)


def test_generated_problems_in_gsm8ks_form_are_read_as_gsm8k(tmp_path: Path) -> None:
    original, rows = tmp_path / "original.jsonl", tmp_path / "rows.jsonl"
    kestrl("data", "word-problems", "--form", "original", "--size", "20", "--out", original)
    kestrl("data", "word-problems", "--size", "20", "--out", rows)
    expected = [scenario.ground_truth for scenario in load_scenarios(rows)]
    read = read_gsm8k(original, split="train", tool=MathTool.CALCULATOR)
    assert [row["reward_model"]["ground_truth"] for row in read] == expected


def test_transcripts_err_as_often_as_asked_and_copy_results(tmp_path: Path) -> None:
    wrong = 0
    rows = generated(Form.TRANSCRIPTS, split="train", seed=5, size=300, mistakes=0.4)
    (tmp_path / "transcripts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for problem, read in zip(
        problems("train", 5, 300), read_conversations(tmp_path / "transcripts.jsonl"), strict=True
    ):
        *_, call, result, final = read.messages
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert float(result["content"]) == pytest.approx(float(value_of(expression)), rel=1e-5)
        assert final["content"] == f"#### {result['content']}"
        wrong += expression != problem.expression
    assert 0.3 < wrong / 300 < 0.5


def test_a_manifest_names_generated_problems(tmp_path: Path) -> None:
    def located(path: str) -> Path:
        return locate_data(path, size=8, base=tmp_path, seed=1, cache_dir=tmp_path, field="spec.data.train.uri")

    assert len(load_scenarios(located("demo://word-problems/validation"))) == 8
    assert len(read_conversations(located("demo://word-problems/transcripts/25"))) == 8
    for path in ("test", "transcripts", "transcripts/101", "train/5"):
        with pytest.raises(UserInputError, match="give train, validation, or transcripts/PERCENT"):
            located(f"demo://word-problems/{path}")
