"""Rewards and environments with a defect that was planted, and sound ones."""

from __future__ import annotations

import random
from typing import Any

from kestrl.rewards import Attempt
from kestrl.tools import ToolResult


def sound(attempt: Attempt) -> float:
    return float(attempt.episode.final_text.strip() == str(attempt.scenario.ground_truth))


def always_zero(attempt: Attempt) -> float:
    return 0.0 * len(attempt.episode.turns)


def pays_for_nothing(attempt: Attempt) -> float:
    return float("wrong" not in attempt.episode.final_text)


def changes(attempt: Attempt) -> float:
    return random.random() + len(attempt.episode.turns)


class Sound:
    """Say the word of the row."""

    def reset(self, word: str) -> str:
        self._word, self._right = word, False
        return f"Say the word with {len(word)} letters."

    def act(self, text: str) -> ToolResult:
        self._right = text == self._word
        return ToolResult(text="", final=True)

    def gold(self) -> str | None:
        return self._word

    def get_reward(self) -> float:
        return float(self._right)


class AlwaysZero(Sound):
    def get_reward(self) -> float:
        return 0.0


class PaysForNothing(Sound):
    def get_reward(self) -> float:
        return 1.0


class Changes(Sound):
    def get_reward(self) -> float:
        return random.random()


class Unsolved(Sound):
    def gold(self) -> None:
        return None


class Leaks(Sound):
    def reset(self, word: str) -> str:
        return f"{super().reset(word)} (It is {word}.)"


class Unlike(Sound):
    def reset(self, word: str) -> str:
        return f"{super().reset(word)} {random.random()}"


class Raises(Sound):
    def act(self, text: str) -> Any:
        raise KeyError(text)
