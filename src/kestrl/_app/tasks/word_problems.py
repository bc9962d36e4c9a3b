"""Generated word problems in the manner of GSM8K, with worked answers: for tests, and for models that are too small for
the original.

Every problem is solved by one arithmetic expression over the numbers in its text. A split has its own people, so that
no question of one occurs in the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from kestrl._app.tasks.writing import write_rows
from kestrl.errors import UserInputError

SOURCE = "kestrl/word-problems"
SYSTEM_PROMPT = "Solve the problem."
"""Short: a small model reads it in every episode. The chat template names the tool."""
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
NAMES = {
    "train": ("Ann", "Ben", "Dan", "Eve", "Ida", "Kim", "Leo", "Mia", "Tom", "Zoe"),
    "validation": ("Amy", "Bob", "Joe", "Lin", "Max", "Sam"),
}
ITEMS = ("pens", "cups", "books", "coins", "eggs", "cards", "stamps", "shells")
OPERATORS = "+-*/"
EASY = "one-step"
"""Part of a `demo://` path that selects problems of one operation."""
MAX_REPEATED = 200
"""Repeated problems in a row after which there are taken to be no others."""


class Form(StrEnum):
    """What a generated file holds."""

    ROWS = "rows"
    """Scenarios in verl's form, for training."""
    ORIGINAL = "original"
    """`question` and `answer`, as GSM8K's own files."""
    TRANSCRIPTS = "transcripts"
    """Conversations with calls of `calculator`, for `kestrl sft`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """A question with the steps that solve it."""

    question: str
    expression: str
    """All steps in one expression, such as 3*5+4."""
    steps: tuple[tuple[str, int], ...]
    """Expression and result of each step."""

    @property
    def answer(self) -> int:
        return self.steps[-1][1]

    @property
    def worked(self) -> str:
        """The answer as GSM8K writes it, with its calculations in `<<...>>`."""
        lines = [f"{step} = <<{step}={result}>>{result}" for step, result in self.steps]
        return "\n".join([*lines, f"#### {self.answer}"])


Draw = Callable[[random.Random, str, str], WordProblem]


def _one(question: str, expression: str, result: int) -> WordProblem:
    return WordProblem(question=question, expression=expression, steps=((expression, result),))


def _gain(rng: random.Random, name: str, item: str) -> WordProblem:
    a, b = rng.randint(11, 49), rng.randint(11, 49)
    return _one(f"{name} has {a} {item} and gets {b} more. How many now?", f"{a}+{b}", a + b)


def _loss(rng: random.Random, name: str, item: str) -> WordProblem:
    a = rng.randint(30, 99)
    b = rng.randint(11, a - 11)
    return _one(f"{name} has {a} {item} and gives {b} away. How many are left?", f"{a}-{b}", a - b)


def _boxes(rng: random.Random, name: str, item: str) -> WordProblem:
    a, b = rng.randint(3, 19), rng.randint(3, 19)
    return _one(f"{name} buys {a} boxes of {b} {item}. How many is that?", f"{a}*{b}", a * b)


def _share(rng: random.Random, name: str, item: str) -> WordProblem:
    b, share = rng.randint(2, 9), rng.randint(3, 11)
    a = b * share
    return _one(f"{name} shares {a} {item} among {b} friends. How many does each get?", f"{a}/{b}", share)


def _boxes_and_more(rng: random.Random, name: str, item: str) -> WordProblem:
    a, b, c = rng.randint(3, 9), rng.randint(3, 19), rng.randint(11, 49)
    return WordProblem(
        question=f"{name} buys {a} boxes of {b} {item} and gets {c} more. How many now?",
        expression=f"{a}*{b}+{c}",
        steps=((f"{a}*{b}", a * b), (f"{a * b}+{c}", a * b + c)),
    )


def _change(rng: random.Random, name: str, item: str) -> WordProblem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    paid = a * b + rng.randint(1, 15)
    return WordProblem(
        question=f"{name} buys {a} {item} for ${b} each and pays with ${paid}. How many dollars are left?",
        expression=f"{paid}-{a}*{b}",
        steps=((f"{a}*{b}", a * b), (f"{paid}-{a * b}", paid - a * b)),
    )


def _half(rng: random.Random, name: str, item: str) -> WordProblem:
    a = 2 * rng.randint(6, 49)
    return WordProblem(
        question=f"{name} sold {a} {item} in April and half as many in May. How many in all?",
        expression=f"{a}+{a}/2",
        steps=((f"{a}/2", a // 2), (f"{a}+{a // 2}", a + a // 2)),
    )


ONE_STEP: tuple[Draw, ...] = (_gain, _loss, _boxes, _share)
TEMPLATES: tuple[Draw, ...] = (*ONE_STEP, _boxes_and_more, _change, _half)


def problems(split: str, seed: int, size: int, *, one_step: bool = False) -> list[WordProblem]:
    """Distinct problems; the first ones do not depend on the size.

    Args:
        split: train or validation.
        seed: Decides on all of them.
        size: Number of problems.
        one_step: Only those that one operation solves.

    Raises:
        UserInputError: There is no such split, or there are not as many problems.
    """
    if split not in NAMES:
        raise UserInputError(f"word-problems: {split!r} is not one of {', '.join(NAMES)}")
    rng = random.Random(f"{split}/{seed}")  # noqa: S311 - seeded on purpose
    templates = ONE_STEP if one_step else TEMPLATES
    by_question: dict[str, WordProblem] = {}
    repeated = 0
    while repeated < MAX_REPEATED:
        if len(by_question) == size:
            return list(by_question.values())
        problem = rng.choice(templates)(rng, rng.choice(NAMES[split]), rng.choice(ITEMS))
        repeated = repeated + 1 if problem.question in by_question else 0
        by_question.setdefault(problem.question, problem)
    raise UserInputError(f"word-problems: there are not {size} different problems; ask for fewer")


def _row(problem: WordProblem, index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "answer": problem.worked, "question": problem.question},
    }


def _evaluated(expression: str) -> str:
    """Value of an expression of numbers and `+-*/`, as the example's calculator prints it."""
    total = Fraction(0)
    for sign, term in _terms(expression):
        product, operator, number = Fraction(1), "*", ""
        for character in f"{term}*":
            if character not in "*/":
                number += character
                continue
            product = product * int(number) if operator == "*" else product / int(number)
            operator, number = character, ""
        total += sign * product
    return str(total) if total.denominator == 1 else f"{float(total):.6g}"


def _terms(expression: str) -> Iterator[tuple[int, str]]:
    for part in expression.replace("-", "+-").split("+"):
        yield (-1, part[1:]) if part.startswith("-") else (1, part)


def _mistaken(expression: str, rng: random.Random) -> str:
    """The expression with another first operator."""
    place = next(index for index, character in enumerate(expression) if character in OPERATORS)
    wrong_operator = rng.choice(OPERATORS.replace(expression[place], ""))
    return expression[:place] + wrong_operator + expression[place + 1 :]


def _transcript(problem: WordProblem, mistakes: float, rng: random.Random) -> dict[str, Any]:
    expression = _mistaken(problem.expression, rng) if rng.random() < mistakes else problem.expression
    result = _evaluated(expression)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]
    return {"messages": messages, "tools": [CALCULATOR]}


def generated(
    form: Form, *, split: str, seed: int, size: int, one_step: bool = False, mistakes: float = 0.0
) -> list[dict[str, Any]]:
    """Generated rows.

    Args:
        form: What a row is.
        split: train or validation.
        seed: Decides on all of it.
        size: Number of rows.
        one_step: Only problems that one operation solves.
        mistakes: Share of transcripts that calculate with a wrong operator, which leaves something to learn by
            reinforcement.

    Raises:
        UserInputError: There is no such split, or there are not as many problems.
    """
    drawn = problems(split, seed, size, one_step=one_step)
    if form is Form.ORIGINAL:
        return [{"question": problem.question, "answer": problem.worked} for problem in drawn]
    if form is Form.ROWS:
        return [_row(problem, index, split) for index, problem in enumerate(drawn)]
    rng = random.Random(f"transcripts/{seed}")  # noqa: S311 - seeded on purpose
    return [_transcript(problem, mistakes, rng) for problem in drawn]


def provide(path: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The file of `demo://word-problems/PATH`, where PATH is a split, or transcripts/PERCENT with that share of
    mistakes; behind `one-step/`, of problems that one operation solves.

    Raises:
        UserInputError: There is no such path.
    """
    kind, _, percent = path.removeprefix(f"{EASY}/").partition("/")
    one_step = path.startswith(f"{EASY}/")
    if kind == Form.TRANSCRIPTS and percent.isdecimal() and int(percent) <= 100:
        share = int(percent) / 100
        rows = generated(Form.TRANSCRIPTS, split="train", seed=seed, size=size, one_step=one_step, mistakes=share)
    elif kind in NAMES and not percent:
        rows = generated(Form.ROWS, split=kind, seed=seed, size=size, one_step=one_step)
    else:
        raise UserInputError(f"demo://word-problems/{path}: give train, validation, or transcripts/PERCENT")
    file = cache_dir / f"word-problems-{path.replace('/', '-')}-{seed}-{size}.jsonl"
    write_rows(file, rows)
    return file
