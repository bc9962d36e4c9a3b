"""Environments of jobs: an adapter that takes turns, a class for TRL, and some that go wrong."""

from __future__ import annotations

import os
import time
from typing import Any

from kestrl.tools import ToolError, ToolResult


class Countdown:
    """Say the numbers from `start` down to 1."""

    def __init__(self, bonus: float = 0.0) -> None:
        self._bonus = bonus
        self._next = 0
        self._said = 0

    def reset(self, start: int) -> str:
        self._next = start
        return f"Count down from {start}."

    def act(self, text: str) -> ToolResult:
        if not text.strip().isdigit():
            raise ToolError("Say a number and nothing else.")
        if int(text) != self._next:
            return ToolResult(text="wrong", final=True)
        self._next, self._said = self._next - 1, self._said + 1
        return ToolResult(text="go on", final=self._next == 0)

    def gold(self) -> list[str]:
        return [str(number) for number in range(self._next, 0, -1)]

    def state(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "variables": sorted(os.environ)}

    def get_reward(self) -> dict[str, float]:
        return {"done": float(self._next == 0 and self._said > 0), "said": self._said + self._bonus}


class Guess:
    """A class for TRL's `environment_factory`, as its users write it."""

    def reset(self, **row: Any) -> str | None:
        self.word, self.right = row["word"], False
        return f" It has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: The guess.
        """
        self.right = word == self.word
        return "right" if self.right else "wrong"

    def act(self, hint: str) -> str:
        """Asks for a hint.

        Args:
            hint: What about.
        """
        return hint

    def get_reward(self) -> float:
        return float(self.right)


class Fragile:
    """Fails in the way that the row names."""

    def reset(self, how: str) -> None:
        self._how = how
        if how == "reset":
            raise KeyError("how")

    def act(self, text: str) -> str:
        match self._how:
            case "raise":
                raise KeyError(text)
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case _:
                pass
        return text

    def get_reward(self) -> float:
        return float("nan") if self._how == "nan" else 0.0


class Rewardless:
    def act(self, text: str) -> str:
        return text
