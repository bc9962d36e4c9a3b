"""GSM8K: the original rows (`question`, and a worked `answer` that ends in `#### 72`) as rows in verl's form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from kestrl.data.rows import MAX_PROBLEMS, raw_rows
from kestrl.errors import SeveralProblems, UserInputError
from kestrl.tools.shapes import is_mapping

SOURCE = "openai/gsm8k"
_ANSWER = re.compile(r"#### *(-?[0-9.,]*[0-9])")


class MathTool(StrEnum):
    """The tool that a row offers; a member's value is the tool's name in the manifest."""

    REWARD = "calc_gsm8k_reward"
    """verl's: scores an attempt at the answer."""
    CALCULATOR = "calculator"
    NONE = "none"
    """One turn without a tool."""


_BEGIN = "You are a math expert. You are given a question and you need to solve it step by step. "
_END = "Put your final answer in the format of `#### <answer>`."
SYSTEM_PROMPTS = {
    MathTool.REWARD: f"{_BEGIN}Reasoning step by step before any tool call. You should use the `calc_gsm8k_reward` "
    "tool after step by step solving the question, before generate final answer at least once and refine your answer "
    f"if necessary. {_END}",
    MathTool.CALCULATOR: f"{_BEGIN}Use the `calculator` tool for every calculation. {_END}",
    MathTool.NONE: f"{_BEGIN}{_END}",
}
"""The first is verl's, word for word."""
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
"""What verl appends to every question."""


def ground_truth(answer: str) -> str:
    """The final number of a worked answer, without thousands separators.

    Raises:
        ValueError: The answer does not end in `#### NUMBER`.
    """
    match = _ANSWER.search(answer)
    if match is None:
        raise ValueError("has no final answer '#### NUMBER'")
    return match[1].replace(",", "")


def verl_row(
    question: str, answer: str, *, index: int, split: str, tool: MathTool, source: str = SOURCE
) -> dict[str, Any]:
    """A problem as verl's preprocessing writes it (examples/data_preprocess/gsm8k_tool_agent_loop.py), without
    `agent_name` where the job's own loop attempts it.

    Args:
        question: The problem.
        answer: Its worked answer.
        index: Number of the problem in its source.
        split: Name of its split, such as train.
        tool: The tool that the system prompt asks for. Only `calc_gsm8k_reward` takes arguments from the row.
        source: Name of the data set.

    Raises:
        ValueError: The answer does not end in `#### NUMBER`.
    """
    expected = ground_truth(answer)
    query = f"{question} {INSTRUCTION}"
    extra: dict[str, Any] = {"split": split, "index": index, "answer": answer, "question": question}
    if tool is MathTool.REWARD:
        extra["need_tools_kwargs"] = True
        extra["tools_kwargs"] = {tool.value: {"create_kwargs": {"ground_truth": expected}}}
    else:
        extra["need_tools_kwargs"] = False
    return {
        "data_source": source,
        **({"agent_name": "single_turn_agent"} if tool is MathTool.NONE else {}),
        "prompt": [{"role": "system", "content": SYSTEM_PROMPTS[tool]}, {"role": "user", "content": query}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": expected},
        "extra_info": {**extra, "interaction_kwargs": {"query": query, "ground_truth": expected}},
    }


def read_gsm8k(
    source: Path, *, split: str, tool: MathTool, skip: int = 0, size: int | None = None
) -> list[dict[str, Any]]:
    """The rows of an original file, JSONL or Parquet, in verl's form.

    Args:
        source: OpenAI's .jsonl file, or the Parquet file of the Hugging Face data set.
        split: Name of the split.
        tool: The tool that the rows offer.
        skip: Rows left out at the beginning, which another file holds.
        size: Number of rows. Default: all that follow.

    Raises:
        UserInputError: The file cannot be read, a row is not GSM8K's, or there are fewer rows than asked for; one line
            for each problem, up to 20.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    end = None if size is None else skip + size
    for index, (line, raw) in islice(enumerate(raw_rows(source)), skip, end):
        try:
            rows.append(verl_row(*_texts(raw), index=index, split=split, tool=tool))
        except ValueError as error:
            problems.append(f"{source}:{line}: {error}")
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise SeveralProblems(problems)
    if not rows or (size is not None and len(rows) < size):
        count = "any" if size is None else f"--size {size}"
        raise UserInputError(f"{source}: holds {len(rows)} rows after --skip {skip}, not {count}; choose fewer")
    return rows


def _texts(raw: object) -> Iterator[str]:
    """Question and answer of an original row."""
    columns: Mapping[str, Any] = raw if is_mapping(raw) else {}
    for name in ("question", "answer"):
        value = columns.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name}: must be text; the source is GSM8K's own file with question and answer")
        if name == "answer" and _ANSWER.search(value) is None:
            raise ValueError(f"{name}: has no final answer '#### NUMBER'")
        yield value
