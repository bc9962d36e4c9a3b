"""ReTool's data through `kestrl data retool` and back through the readers of SFT and of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.test_math_data import kestrl

from kestrl._app.tasks.retool import ANSWER_FORMAT, Questions, RowLeftOut, Transcripts
from kestrl._app.tasks.writing import write_rows
from kestrl.data import load_scenarios
from kestrl.data.conversations import CODE_INTERPRETER, read_conversations

RULES = "Solve it by code in <code></code> tags.\n*user question:*\n"
ASKED = "What is 2 + 2?\nUse the format:\n<answer>\n\\boxed{'The final answer goes here.'}\n</answer>"
SAID = (
    "I compute.\n<code>\n```python\nx = 2 + 2\nprint(x)\n```\n</code>\n<interpreter>\n4\n</interpreter>\nSo\n"
    "<answer>\n\\boxed{4}\n</answer>"
)


def transcript(said: str = SAID, asked: str = RULES + ASKED) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def dapo(question: str, answer: Any, index: str) -> dict[str, Any]:
    """A row as DAPO-Math-17k has it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_transcripts_become_conversations_with_calls(tmp_path: Path, suffix: str) -> None:
    direct = transcript("It is <answer>\\boxed{4}</answer>")
    source, out = write(tmp_path / "rows.jsonl", [transcript(), direct]), tmp_path / f"sft.{suffix}"
    assert kestrl("data", "retool", "--source", source, "--out", out) == f"{out}: 2 conversations\n"
    first, second = read_conversations(out)
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "x = 2 + 2\nprint(x)"}}}
    question = {"role": "user", "content": "What is 2 + 2?\nUse the format:\n\n\\boxed{'The final answer goes here.'}"}
    assert first.messages == [
        question,
        {"role": "assistant", "content": "I compute.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "So\n\n\\boxed{4}"},
    ]
    assert second.messages == [question, {"role": "assistant", "content": "It is \\boxed{4}"}]
    assert first.tools == second.tools == [CODE_INTERPRETER]


def test_a_file_of_sft_is_read_the_same_with_and_without_conversion(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [transcript()])
    kestrl("data", "retool", "--source", source, "--out", tmp_path / "sft.jsonl")
    assert read_conversations(tmp_path / "sft.jsonl") == read_conversations(source)


CODE = "<code>print(4)</code>"
RESULT = "<interpreter>4</interpreter>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "messages: must be a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]\.role: is 'robot'"),
        ({"messages": [*transcript()["messages"], *transcript()["messages"]]}, "are not one of the user and one of"),
        (transcript(asked="What is 2 + 2?"), r"the user's message has no '\*user question:\*'"),
        (transcript(CODE), "the text ends after </code>"),
        (transcript("<code>print(4)"), "the text ends after <code>"),
        (transcript(CODE + RESULT), "there is no answer after the last result"),
        (transcript(CODE + "It prints" + RESULT + "4"), "there is text between </code> and <interpreter>"),
        (transcript(CODE + CODE + RESULT + "4"), "<code> follows </code>"),
        (transcript(RESULT + "4"), "<interpreter> follows no tag"),
        (transcript("<code><code>1</code></code>" + RESULT + "4"), "<code> follows <code>"),
        (transcript(CODE + RESULT + "<answer>4"), "the text ends after <answer>"),
        (transcript("<answer>4</answer>" + CODE + RESULT + "5"), "<code> follows </answer>"),
        (transcript("<code> \n</code>" + RESULT + "4"), "a <code> section is empty"),
        (transcript("<code>```js\nx\n```</code>" + RESULT + "4"), "a <code> section has a fence that is not"),
        (transcript("  "), "there is no answer after the last result"),
    ],
)
def test_a_malformed_transcript_has_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowLeftOut, match=reason):
        Transcripts()(row, 0)


def test_what_is_left_out_is_counted_by_reason_with_its_first_line(tmp_path: Path) -> None:
    bad = [transcript(CODE), transcript(CODE), transcript(CODE + RESULT), "text"]
    source = write(tmp_path / "rows.jsonl", [transcript(), *bad, transcript()])
    printed = kestrl("data", "retool", "--source", source, "--out", tmp_path / "sft.jsonl").splitlines()
    assert printed == [
        f"{tmp_path / 'sft.jsonl'}: 2 conversations",
        "left out: 4 rows",
        f"  2: the text ends after </code> (first {source}:2)",
        f"  1: there is no answer after the last result (first {source}:4)",
        f"  1: a row must be an object, is str (first {source}:5)",
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_questions_become_rows_for_the_jobs_own_loop(tmp_path: Path, suffix: str) -> None:
    repeated = dapo("1 + 1?", "2", "a")
    rows = [repeated, dapo("2 + 2?", 4, "b"), repeated, dapo("1 + 1?", "3", "c"), dapo("3 + 3?", "6", "a")]
    source = write(tmp_path / "dapo.jsonl", rows)
    if suffix == "parquet":
        source = tmp_path / "dapo.parquet"
        rows[1]["reward_model"]["ground_truth"] = "4"
        write_rows(source, rows)
    out = tmp_path / f"rl.{suffix}"
    printed = kestrl("data", "retool", "--source", source, "--out", out).splitlines()
    assert printed[:2] == [f"{out}: 2 rows", "left out: 3 rows"]
    assert {line.partition(" (")[0] for line in printed[2:]} == {
        "  1: repeats a question",
        "  1: repeats a question with another answer",
        "  1: extra_info.index: is that of another question",
    }
    first, second = load_scenarios(out)
    assert (first.id, second.id) == ("math_dapo/a", "math_dapo/b")
    assert first.messages == [{"role": "user", "content": f"1 + 1?{ANSWER_FORMAT}"}]
    assert (first.ground_truth, second.ground_truth) == ("2", "4")
    assert first.agent == ""


def test_problems_with_answers_are_questions_too(tmp_path: Path) -> None:
    for columns in (("problem", "answer"), ("Problem", "Answer")):
        rows = [dict(zip(columns, row, strict=True)) for row in (("1 + 1?", 2), ("2 + 2?", "4"), ("3 + 3?", 6))]
        source = write(tmp_path / "aime_2025.jsonl", rows)
        kestrl("data", "retool", "--source", source, "--out", tmp_path / "a.jsonl", "--skip", "1", "--size", "1")
        (only,) = load_scenarios(tmp_path / "a.jsonl")
        assert (only.id, only.ground_truth) == ("aime_2025/1", "4")
        assert only.messages[0]["content"] == "2 + 2?" + ANSWER_FORMAT
    kestrl("data", "retool", "--source", source, "--name", "mine", "--out", tmp_path / "b.jsonl")
    assert load_scenarios(tmp_path / "b.jsonl")[2].id == "mine/2"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "reward_model": {"ground_truth": "1"}}, "prompt: must be a list of messages"),
        ({**dapo("x", "1", "a"), "prompt": [{"role": "system", "content": "x"}]}, "must end with text of the user"),
        ({**dapo("x", "1", "a"), "reward_model": None}, "reward_model: must be an object with ground_truth"),
        ({**dapo("x", "1", "a"), "extra_info": []}, "extra_info: must be an object"),
        ({**dapo("x", "1", "a"), "data_source": ""}, "data_source: "),
        (dapo("x", " ", "a"), "reward_model.ground_truth: must be text or a number"),
        (dapo("x", True, "a"), "reward_model.ground_truth: must be text or a number"),
        (dapo("x\ud800", "1", "a"), "prompt.0.content: holds the lone surrogate"),
        ({"problem": " ", "answer": 1}, "problem: must be text"),
        ({"Problem": "x"}, "Answer: must be text or a number"),
    ],
)
def test_a_malformed_question_has_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowLeftOut, match=reason):
        Questions("name")(row, 0)


def test_a_source_without_usable_rows_is_refused_with_the_reasons(tmp_path: Path) -> None:
    def refused(*rows: Any, options: tuple[str, ...] = ()) -> str:
        source = write(tmp_path / "rows.jsonl", list(rows))
        return kestrl("data", "retool", "--source", source, "--out", tmp_path / "out.jsonl", *options, code=2)

    assert "gives 0 rows after --skip 0, not any" in refused(transcript(CODE))
    assert "  1: the text ends after </code> (first " in refused(transcript(CODE))
    assert "gives 1 rows after --skip 0, not --size 2" in refused(transcript(), options=("--size", "2"))
    assert "its first row has the columns text; it must have messages" in refused({"text": "x"})
    assert "holds no rows" in refused()
    assert not (tmp_path / "out.jsonl").exists()
