"""Sampling seeds: 63 bits, the same in every process and run.

A linear loop has one call after the other, and the seed of a turn is that of its number. Calls that arrive with a
prompt of their own, several at once, have no such order: the seed of one depends on its prompt, and on how many calls
of the same prompt arrived before it, so that calls in any order of arrival have the same seeds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence


def turn_seed(episode_seed: int, turn: int) -> int:
    """The seed of a turn of a linear loop."""
    return _seed(f"{episode_seed}:{turn}".encode())


def prompt_seed(episode_seed: int, prompt: bytes, occurrence: int) -> int:
    """The seed of a call with a prompt of its own.

    Args:
        episode_seed: The episode's.
        prompt: Digest of the prompt's ids.
        occurrence: Number of calls with this prompt that arrived before.
    """
    return _seed(f"{episode_seed}:{occurrence}:".encode() + prompt)


def _seed(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class PromptSeeds:
    """The seeds of an episode's calls with prompts of their own."""

    def __init__(self, episode_seed: int) -> None:
        self._episode_seed = episode_seed
        self._arrived: Counter[bytes] = Counter()

    def next(self, prompt_ids: Sequence[int]) -> int:
        """The seed of a call that arrives now."""
        prompt = hashlib.sha256(array("q", prompt_ids).tobytes()).digest()
        occurrence = self._arrived[prompt]
        self._arrived[prompt] += 1
        return prompt_seed(self._episode_seed, prompt, occurrence)
