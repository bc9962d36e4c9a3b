r"""Generated arithmetic for a model that calculates by running Python: the scaled-down data of ReTool's two stages.

Rows for reinforcement learning are in verl's form. Conversations for supervised fine-tuning are in ReTool's own form
(arXiv 2504.11536), in which the assistant's text holds `<code>`, `<interpreter>` and `<answer>` sections, and
`\boxed{...}` is the answer; `kestrl sft` reads them as calls of `code_interpreter`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrl._app.tasks.splits import SPLITS, distinct
from kestrl._app.tasks.writing import write_rows
from kestrl.errors import UserInputError

SOURCE = "kestrl/arithmetic"
TRANSCRIPTS = "transcripts"
OPERATORS = "+-*"
LARGEST = 99
"""Largest operand; the smallest is 2."""


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """Numbers and the operators between them."""

    operands: tuple[int, ...]
    operators: tuple[str, ...]
    """One fewer than operands."""

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"

    @property
    def expression(self) -> str:
        """The problem in Python, such as 12 * 34 - 5."""
        pairs = zip(self.operators, self.operands[1:], strict=True)
        return str(self.operands[0]) + "".join(f" {operator} {number}" for operator, number in pairs)

    @property
    def answer(self) -> int:
        """The value: products before sums, as in Python."""
        terms = [self.operands[0]]
        for operator, number in zip(self.operators, self.operands[1:], strict=True):
            if operator == "*":
                terms[-1] *= number
            else:
                terms.append(number if operator == "+" else -number)
        return sum(terms)


def _drawn(rng: random.Random) -> ArithmeticProblem:
    count = rng.randint(2, 3)
    operands = tuple(rng.randint(2, LARGEST) for _ in range(count))
    return ArithmeticProblem(operands, tuple(rng.choice(OPERATORS) for _ in range(count - 1)))


def problems(split: str, *, seed: int, size: int) -> Iterator[ArithmeticProblem]:
    """Distinct problems; the first ones do not depend on the size.

    Args:
        split: train or validation.
        seed: Decides on all of them.
        size: Number of problems.

    Raises:
        UserInputError: There is no such split, or there are not as many problems.
    """
    rng = random.Random(f"{split}/{seed}")  # noqa: S311 - seeded on purpose
    try:
        yield from distinct(
            split, size, lambda: _drawn(rng), items="problems", text_of=lambda problem: problem.expression
        )
    except UserInputError as error:
        raise UserInputError(f"arithmetic: {error}") from error


def rows(split: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    """Scenarios in verl's form, for a loop with tools.

    Raises:
        UserInputError: As `problems`.
    """
    return [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index, "expression": problem.expression},
        }
        for index, problem in enumerate(problems(split, seed=seed, size=size))
    ]


def transcripts(split: str, *, seed: int, size: int, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Conversations in ReTool's form: a program, what it printed, and that number in a box.

    Args:
        split: train or validation.
        seed: Decides on all of it.
        size: Number of conversations.
        mistakes: Share of them whose program has a wrong operator, which leaves something to learn by reinforcement.

    Raises:
        UserInputError: As `problems`.
    """
    rng = random.Random(f"{TRANSCRIPTS}/{seed}")  # noqa: S311 - seeded on purpose
    return [
        _transcript(problem.question, _mistaken(problem, rng) if rng.random() < mistakes else problem)
        for problem in problems(split, seed=seed, size=size)
    ]


def _transcript(question: str, calculated: ArithmeticProblem) -> dict[str, Any]:
    answer_text = (
        f"<code>\n```python\nprint({calculated.expression})\n```\n</code>\n"
        f"<interpreter>\n{calculated.answer}\n</interpreter>\n"
        f"<answer>\n\\boxed{{{calculated.answer}}}\n</answer>"
    )
    return {
        "messages": [
            {"role": "user", "content": f"*user question:*\n{question}"},
            {"role": "assistant", "content": answer_text},
        ]
    }


def _mistaken(problem: ArithmeticProblem, rng: random.Random) -> ArithmeticProblem:
    """The problem with one other operator."""
    place = rng.randrange(len(problem.operators))
    wrong_operator = rng.choice(OPERATORS.replace(problem.operators[place], ""))
    changed = (*problem.operators[:place], wrong_operator, *problem.operators[place + 1 :])
    return ArithmeticProblem(problem.operands, changed)


def provide(path: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The file of `demo://arithmetic/PATH`: a split, or transcripts/PERCENT with that share of mistakes.

    Raises:
        UserInputError: There is no such path.
    """
    kind, _, percent = path.partition("/")
    if kind == TRANSCRIPTS and percent.isdecimal() and int(percent) <= 100:
        generated_rows = transcripts("train", seed=seed, size=size, mistakes=int(percent) / 100)
    elif path in SPLITS:
        generated_rows = rows(path, seed=seed, size=size)
    else:
        raise UserInputError(f"demo://arithmetic/{path}: give train, validation, or transcripts/PERCENT")
    file = cache_dir / f"arithmetic-{path.replace('/', '-')}-{seed}-{size}.jsonl"
    write_rows(file, generated_rows)
    return file
