"""A small task of several turns, and the model that begins to learn it.

A scenario is a chain of keys. In each turn the policy names a handle, and the tool answers with the chain's next key if
it is the key's right one, otherwise with the same key again. Each key has three handles that look alike to the base
model, so the policy learns one choice of three for each key. The last key of a chain ends the episode. An episode's
reward is the share of its keys whose first handle was right; its number of turns is the chain's length and one more for
each error. Long scenarios have keys of their own, so that what they teach is learned from them alone.
"""

# transformers has loose types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.random_models import make

START, GOOD, BAD, END = 1, 2, 3, 4
KEYS, FIRST_KEY, FIRST_HANDLE = 24, 8, 32
CHOICES = 3
ATTEMPTS = 2
"""Turns of an episode at most, in keys of its chain."""
MEAN_KEYS, LONGEST = 4, 12
"""Keys of a chain that is not long: geometric, and their bound."""
LONG, LONG_SHARE = 4, 0.1

Chain = tuple[int, ...]


def is_long(chain: Chain) -> bool:
    """Whether a chain has the keys of long scenarios."""
    return chain[0] >= FIRST_KEY + KEYS // 2


def draw_chain(chance: random.Random, long: bool | None = None) -> Chain:
    """A scenario; one in ten is long, unless it is said whether this one is."""
    if long is None:
        long = chance.random() < LONG_SHARE
    factor, length = (LONG if long else 1), 1
    while chance.random() > 1 / (MEAN_KEYS * factor) and length < LONGEST * factor:
        length += 1
    first = FIRST_KEY + (KEYS // 2 if long else 0)
    return tuple(chance.randrange(first, first + KEYS // 2) for _ in range(length))


@cache
def handles(key: int) -> tuple[int, ...]:
    """The three handles of a key; the first is right."""
    return tuple(random.Random(f"handles/{key}").sample(range(FIRST_HANDLE, FIRST_HANDLE + KEYS), CHOICES))


@dataclass(slots=True)
class Play:
    """An episode as it was sampled."""

    chain: Chain
    turns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Sampled tokens of each turn."""
    behaviour: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Their log-probabilities under the version that sampled them."""
    versions: list[int] = field(default_factory=list[int])
    """The version that sampled each turn which has begun by the clock."""

    def _right(self) -> list[bool]:
        """Whether each turn found its key's right handle."""
        place, outcomes = 0, list[bool]()
        for turn in self.turns:
            outcomes.append(turn == (handles(self.chain[place])[0], END))
            place += outcomes[-1]
        return outcomes

    @property
    def has_ended(self) -> bool:
        return sum(self._right()) == len(self.chain) or len(self.turns) == ATTEMPTS * len(self.chain)

    @property
    def reward(self) -> float:
        outcomes = self._right()
        first_of_key = [True, *outcomes][: len(outcomes)]
        hits = sum(first and right for first, right in zip(first_of_key, outcomes, strict=True))
        return hits / len(self.chain)

    def answer(self) -> list[int]:
        """The tool's answer to the last turn."""
        outcomes = self._right()
        return [GOOD if outcomes[-1] else BAD, self.chain[sum(outcomes)]]

    @property
    def prompt(self) -> list[int]:
        return [START, self.chain[0]]

    def tokens(self) -> tuple[list[int], list[int]]:
        """Tokens after the prompt, and the turn that sampled each or -1; without an answer to the last turn."""
        ids, turn_of, place = list[int](), list[int](), 0
        outcomes = self._right()
        for number, turn in enumerate(self.turns):
            ids += turn
            turn_of += [number] * len(turn)
            place += outcomes[number]
            if number < len(self.turns) - 1:
                ids += [GOOD if outcomes[number] else BAD, self.chain[place]]
                turn_of += [-1, -1]
        return ids, turn_of

    def rewind(self, turns: int) -> None:
        """Forgets the turns after the first ones."""
        del self.turns[turns:], self.behaviour[turns:]


def taught(chain: Chain, chance: random.Random) -> list[int]:
    """Tokens of an episode of the base model's training: handles of a key in random order until the right one."""
    ids = [START, chain[0]]
    for place, key in enumerate(chain):
        options = list(handles(key))
        chance.shuffle(options)
        while (choice := options.pop()) != handles(key)[0]:
            ids += [choice, END, BAD, key]
        ids += [choice, END]
        if place < len(chain) - 1:
            ids += [GOOD, chain[place + 1]]
    return ids


def base_model(folder: Path, steps: int) -> Path:
    """A tiny model that knows the form of the task and each key's handles, and not which of them is right."""
    import torch
    from transformers import AutoModelForCausalLM

    path = folder / "taught"
    if (path / "config.json").exists():
        return path
    network: Any = AutoModelForCausalLM.from_pretrained(make("tiny", folder, "cpu"))
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.0)
    chance = random.Random("base")
    for _ in range(steps):
        rows = [_window(chance) for _ in range(32)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        loss = network(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.save_pretrained(path)
    return path


def _window(chance: random.Random) -> list[int]:
    """An episode for the base model's training: one in two long, so that it knows the keys of both kinds."""
    first = FIRST_KEY + chance.choice((0, KEYS // 2))
    length = chance.choice((2, 4, 8, 16))
    return taught(tuple(chance.randrange(first, first + KEYS // 2) for _ in range(length)), chance)


def mean_reward(plays: Sequence[Play]) -> float:
    return sum(play.reward for play in plays) / len(plays)
