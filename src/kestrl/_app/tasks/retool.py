r"""ReTool's data (arXiv 2504.11536) as files for KestRL: transcripts with code for `kestrl sft`, and questions for
reinforcement learning.

Follows verl's recipe for ReTool (its SFT preprocessing, and `map_fn` and `map_fn2` of its data set). Rows that cannot
be converted are left out and counted by reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from kestrl.data.conversations import CODE_INTERPRETER, QUESTION, RefusedConversation, from_retool, read_messages
from kestrl.data.forms import BadRow, scenario
from kestrl.data.rows import raw_rows
from kestrl.data.values import columns_as_json, without_nulls
from kestrl.errors import UserInputError
from kestrl.tools.shapes import is_list, is_mapping

ANSWER_FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
"""Text that verl's recipe appends to every question, word for word."""
PROBLEM_COLUMNS = (("problem", "answer"), ("Problem", "Answer"))
"""Columns of evaluation sets such as AIME 2025 and AIME 2024."""
_TAG = re.compile(r"</?(?:code|interpreter|answer)>")
_AFTER = {
    "": ("<code>", "<answer>"),
    "<code>": ("</code>",),
    "</code>": ("<interpreter>",),
    "<interpreter>": ("</interpreter>",),
    "</interpreter>": ("<code>", "<answer>"),
    "<answer>": ("</answer>",),
    "</answer>": (),
}
"""Tags that may follow a tag of a transcript; the empty one is its beginning."""


class RowLeftOut(ValueError):
    """A row that cannot be converted; the message is the reason, in the same words for equal reasons."""


@dataclass(slots=True)
class Converted:
    """Rows to write, and what was left out."""

    what: str
    """What the rows are."""
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Lines of the source by reason."""

    def lines(self, source: Path) -> Iterator[str]:
        """What was left out, for people: a line for each reason, most frequent first."""
        if self.left_out:
            yield f"left out: {sum(map(len, self.left_out.values()))} rows"
        for reason, lines in sorted(self.left_out.items(), key=lambda item: -len(item[1])):
            yield f"  {len(lines)}: {reason} (first {source}:{lines[0]})"


class Conversion(Protocol):
    """Makes a row of a source's row."""

    what: str

    def __call__(self, columns: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The row to write.

        Raises:
            LeftOut: It cannot be converted.
        """
        ...


def read_retool(source: Path, *, name: str | None = None, skip: int = 0, size: int | None = None) -> Converted:
    """Converts a file of ReTool's SFT rows (`messages`), of verl's RL rows (`prompt`, `reward_model`) or of problems
    with answers (`problem`, `answer`); the first row decides which.

    Args:
        source: A .jsonl or .parquet file.
        name: `data_source` of problems with answers. Default: the name of the file.
        skip: Converted rows left out at the beginning, which another file holds.
        size: Number of rows. Default: all that follow.

    Raises:
        UserInputError: The file cannot be read, is of no known form, or has too few rows that can be converted.
    """
    rows = enumerate(raw_rows(source))
    first = next(rows, None)
    if first is None:
        raise UserInputError(f"{source}: holds no rows")
    convert = _conversion(source, first[1][1], name or source.stem)
    conversion = Converted(convert.what)

    def converted() -> Iterator[dict[str, Any]]:
        for index, (line, raw) in (row for part in ((first,), rows) for row in part):
            try:
                if not is_mapping(raw):
                    raise RowLeftOut(f"a row must be an object, is {type(raw).__name__}")
                yield convert(cast("dict[str, Any]", without_nulls(raw)), index)
            except RowLeftOut as error:
                conversion.left_out.setdefault(str(error), []).append(line)

    conversion.rows = list(islice(converted(), skip, None if size is None else skip + size))
    if not conversion.rows or (size is not None and len(conversion.rows) < size):
        count = "any" if size is None else f"--size {size}"
        reasons = "\n".join(conversion.lines(source))
        raise UserInputError(
            f"{source}: gives {len(conversion.rows)} rows after --skip {skip}, not {count}; choose fewer, or "
            "another source" + (f"\n{reasons}" if reasons else "")
        )
    return conversion


def _conversion(source: Path, row: object, name: str) -> Conversion:
    columns: Mapping[str, Any] = row if is_mapping(row) else {}
    if "messages" in columns:
        return Transcripts()
    if "prompt" in columns or any(problem in columns for problem, _ in PROBLEM_COLUMNS):
        return Questions(name)
    raise UserInputError(
        f"{source}: its first row has the columns {', '.join(columns) or 'none'}; it must have messages (ReTool's SFT "
        "rows), prompt and reward_model (verl's rows), or problem and answer"
    )


class Transcripts:
    """Converts transcripts whose assistant text holds `<code>` and `<interpreter>` sections."""

    what = "conversations"

    def __call__(self, columns: Mapping[str, Any], index: int) -> dict[str, Any]:  # noqa: ARG002 - of the protocol
        try:
            messages = read_messages(columns)
        except RefusedConversation as error:
            raise RowLeftOut(str(error)) from error
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise RowLeftOut("messages: are not one of the user and one of the assistant")
        if QUESTION not in messages[0]["content"]:
            raise RowLeftOut(f"the user's message has no {QUESTION!r}")
        _check_sections(messages[1]["content"])
        turns = from_retool(messages)
        if turns[-1]["role"] != "assistant" or turns[-1].get("tool_calls"):
            raise RowLeftOut("there is no answer after the last result")
        for code in (call["function"]["arguments"]["code"] for turn in turns for call in turn.get("tool_calls", ())):
            if not code.strip():
                raise RowLeftOut("a <code> section is empty")
            if code.lstrip().startswith("```"):
                raise RowLeftOut("a <code> section has a fence that is not ```python ... ```")
        return {"messages": turns, "tools": [CODE_INTERPRETER]}


def _check_sections(text: str) -> None:
    """Checks that every `<code>` is closed and directly followed by its result.

    Raises:
        LeftOut: One is not, or other tags are out of order.
    """
    last, end = "", 0
    for tag in _TAG.finditer(text):
        if tag[0] not in _AFTER[last]:
            raise RowLeftOut(f"{tag[0]} follows {last or 'no tag'}")
        if last == "</code>" and text[end : tag.start()].strip():
            raise RowLeftOut("there is text between </code> and <interpreter>")
        last, end = tag[0], tag.end()
    if last not in {"", "</interpreter>", "</answer>"}:
        raise RowLeftOut(f"the text ends after {last}")


class Questions:
    """Converts questions with answers to verl's rows for the tool agent; a question that came before is left out."""

    what = "rows"

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: dict[str, str] = {}
        """Answer of each question so far."""
        self._ids: set[str] = set()

    def __call__(self, columns: Mapping[str, Any], index: int) -> dict[str, Any]:
        row = self._of_problem(columns, index) or _of_prompt(columns, index)
        usable, problems = columns_as_json(row)
        try:
            parsed_scenario = None if problems else scenario(usable, index)
        except BadRow as error:
            problems = list(error.problems)
            parsed_scenario = None
        if parsed_scenario is None:
            raise RowLeftOut(problems[0])
        question, answer = parsed_scenario.messages[-1]["content"], str(parsed_scenario.ground_truth)
        if question in self._answers:
            same = self._answers[question] == answer
            raise RowLeftOut("repeats a question" if same else "repeats a question with another answer")
        if parsed_scenario.id in self._ids:
            raise RowLeftOut("extra_info.index: is that of another question")
        self._answers[question] = answer
        self._ids.add(parsed_scenario.id)
        return row

    def _of_problem(self, columns: Mapping[str, Any], index: int) -> dict[str, Any] | None:
        """The row of a problem; None if the columns are others."""
        for problem, answer in PROBLEM_COLUMNS:
            if problem in columns:
                question = columns[problem]
                if not isinstance(question, str) or not question.strip():
                    raise RowLeftOut(f"{problem}: must be text")
                return _verl_row(
                    self._name,
                    [{"role": "user", "content": question + ANSWER_FORMAT}],
                    _answer(columns.get(answer), answer),
                    {"index": index},
                )
        return None


def _of_prompt(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    prompt, reward, extra = columns.get("prompt"), columns.get("reward_model"), columns.get("extra_info", {})
    if not is_list(prompt) or not prompt or not all(map(is_mapping, prompt)):
        raise RowLeftOut("prompt: must be a list of messages")
    messages = [dict(cast("dict[str, Any]", message)) for message in prompt]
    last = messages[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str) or not last["content"].strip():
        raise RowLeftOut("prompt: must end with text of the user")
    if not is_mapping(reward):
        raise RowLeftOut("reward_model: must be an object with ground_truth")
    if not is_mapping(extra):
        raise RowLeftOut("extra_info: must be an object")
    last["content"] += ANSWER_FORMAT
    return _verl_row(
        columns.get("data_source", ""),
        messages,
        _answer(reward.get("ground_truth"), "reward_model.ground_truth"),
        {"index": index, **extra},
    )


def _answer(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise RowLeftOut(f"{column}: must be text or a number")
    return str(value)


def _verl_row(source: str, prompt: list[dict[str, Any]], answer: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": extra,
    }
