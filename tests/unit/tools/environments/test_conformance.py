"""The conformance suite of adapters: ours and a sound one pass, and each defect is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kestrl.testing.environments import check_environment
from kestrl.tools import ToolError, ToolResult


class Sound:
    """Say the word of the row."""

    def reset(self, word: str) -> str:
        self.word, self.right = word, 0.0
        return f"{len(word)} letters"

    async def act(self, text: str) -> ToolResult:
        if not text:
            raise ToolError("Say a word.")
        self.right = float(text == self.word)
        return ToolResult(text="right" if self.right else "wrong", final=bool(self.right))

    def gold(self) -> str:
        return self.word

    def get_reward(self) -> Any:
        return {"right": self.right}


class NoReward:
    def act(self, text: str) -> str:
        return text


class NothingToPlay:
    def get_reward(self) -> float:
        return 0.0


class Forgetful(Sound):
    def reset(self, word: str) -> str:
        return f"{super().reset(word)} {random.random()}"


class Dice(Sound):
    def get_reward(self) -> Any:
        return random.random()


class Shared(Sound):
    total = 0.0

    async def act(self, text: str) -> ToolResult:
        Shared.total += 1
        return await super().act(text)

    def get_reward(self) -> Any:
        return Shared.total


class Leaks(Sound):
    def reset(self, word: str) -> str:
        return super().reset(word) + word


class Generous(Sound):
    def get_reward(self) -> Any:
        return 1.0


class Nan(Sound):
    def get_reward(self) -> Any:
        return float("nan")


class Strict(Sound):
    async def act(self, text: str) -> ToolResult:
        if not text:
            raise ValueError("empty")
        return await super().act(text)


async def run(make: Callable[[], Any]) -> None:
    await check_environment(make, rows=[{"word": "lamp"}], turns=["chair", "lamp"], wrong="")


async def test_a_sound_adapter_passes() -> None:
    await run(Sound)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (NoReward, r"it has no get_reward\(\)"),
        (NothingToPlay, "nothing can be played"),
        (Forgetful, "shows something else the second time"),
        (Dice, "earn another reward the second time"),
        (Shared, "earn another reward the second time|changed by another one"),
        (Leaks, "the solution stands in what reset"),
        (Generous, "the solution earns 1 and doing nothing 1"),
        (Nan, "return a finite number"),
        (Strict, r"act\(\) raised ValueError: empty"),
    ],
)
async def test_a_defect_is_named(adapter: Callable[[], Any], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        await run(adapter)
