"""Generators of reasoning-gym: a question, one answer, and the score that the generator gives it.

Runs in the interpreter of the environment. A row has the position of its task among those of a seed, and the digest of
the task, so that another version of the package, with other tasks, is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from kestrl.errors import ToolFailure, UserInputError
from kestrl.tools import ToolResult

LARGEST_INDEX = 2**31 - 2


def task_digest(entry: Mapping[str, Any]) -> str:
    """SHA-256 of a task, as far as it decides on question and score."""
    text = json.dumps([entry["question"], entry["answer"]], ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def dataset(generator: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """A data set of the package.

    Raises:
        ValueError: There is no such generator, or its settings do not fit.
    """
    package: Any = import_module("reasoning_gym")  # of the environment's own interpreter

    try:
        return package.create_dataset(generator, seed=seed, size=size, **settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{generator}: the settings do not fit: {error}") from error


class ReasoningGym:
    """One task of a generator."""

    def __init__(self, generator: str, settings: dict[str, Any]) -> None:
        self._generator, self._settings = generator, settings
        self._score = 0.0
        self._dataset: Any = None
        self._entry: Any = None

    @classmethod
    def start_service(cls, generator: str, settings: dict[str, Any]) -> None:
        """Imports the package, which takes seconds, once for all episodes; looks whether the generator has tasks.

        Raises:
            UserInputError: It does not exist, or its settings do not fit.
        """
        try:
            dataset(generator, settings, seed=0, size=1)
        except ValueError as error:
            raise UserInputError(f"reasoningGym: {error}") from error

    def reset(self, index: int, seed: int, digest: str | None = None, prompt: Any = None) -> str:
        """The question, where the row has none.

        Args:
            index: Position of the task among those of the seed.
            seed: Seed of the data set.
            digest: Digest of the task that the row was written from.
            prompt: Prompt of the row.

        Raises:
            ToolFailure: The task is another one than the row's.
        """
        if not 0 <= index <= LARGEST_INDEX:
            raise ToolFailure(f"{self._generator}: index: {index} is no position of a task", code="tool_row_invalid")
        self._dataset = dataset(self._generator, self._settings, seed=seed, size=index + 1)
        self._entry = self._dataset[index]
        if digest is not None and digest != task_digest(self._entry):
            raise ToolFailure(
                f"{self._generator}: task {index} of seed {seed} is another one than when the row was written: the "
                "package has another version, or the settings are others; write the rows again with kestrl data "
                "reasoning-gym, or pin the version",
                code="tool_row_changed",
            )
        return "" if prompt is not None else str(self._entry["question"])

    def act(self, text: str) -> ToolResult:
        """Scores the answer, which ends the episode."""
        self._score = float(self._dataset.score_answer(text.strip(), self._entry))
        return ToolResult(text="", final=True)

    def get_reward(self) -> float:
        return self._score

    def gold(self) -> str | None:
        """The generator's own answer; None where any right one counts and it names none."""
        answer = self._entry["answer"]
        return None if answer is None else str(answer)


def rows(generator: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """A row for each task of a data set."""
    tasks = dataset(generator, settings, seed=seed, size=size)
    for index in range(size):
        entry = tasks[index]
        yield {
            "id": f"{generator}-{seed}-{index}",
            "prompt": str(entry["question"]),
            "index": index,
            "seed": seed,
            "digest": task_digest(entry),
        }


def transcripts(generator: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """A conversation for each task of a data set: its question and the generator's own answer.

    Raises:
        ValueError: A task has no answer of its own, or the settings do not fit.
    """
    tasks = dataset(generator, settings, seed=seed, size=size)
    for index in range(size):
        entry = tasks[index]
        if entry["answer"] is None:
            raise ValueError(f"{generator}: task {index} names no answer, since any right one counts")
        question = {"role": "user", "content": str(entry["question"])}
        yield {"messages": [question, {"role": "assistant", "content": str(entry["answer"])}]}
