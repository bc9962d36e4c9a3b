"""The policy versions of a group's tokens. A group that continues over updates has several. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from kestrl.episode import Episode, Group, Row, Turn


def token_versions(group: Group, steps: Mapping[str, int]) -> Counter[int]:
    """Number of a group's sampled tokens by the step of their version.

    Args:
        group: The group.
        steps: Step of each version, by name.
    """
    tokens = Counter[int]()
    for episode in group.episodes:
        for turn in episode.turns:
            tokens[steps[turn.policy]] += sum(episode.rows[turn.row].mask[turn.start : turn.end])
    return +tokens


def without_tokens(group: Group, versions: Collection[str]) -> Group:
    """The group whose tokens of some versions are context: not trained on, and of no weight."""
    return replace(group, episodes=[_without_tokens(episode, versions) for episode in group.episodes])


def _without_tokens(episode: Episode, versions: Collection[str]) -> Episode:
    masked_turns = [turn for turn in episode.turns if turn.policy in versions]
    rows = [
        _without_turns(row, [turn for turn in masked_turns if turn.row == number])
        for number, row in enumerate(episode.rows)
    ]
    return replace(episode, rows=rows)


def _without_turns(row: Row, turns: Collection[Turn]) -> Row:
    if not turns:
        return row
    mask, logprobs = bytearray(row.mask), array("f", row.logprobs)
    for turn in turns:
        length = turn.end - turn.start
        mask[turn.start : turn.end] = bytes(length)
        logprobs[turn.start : turn.end] = array("f", bytes(4 * length))
    return replace(row, mask=bytes(mask), logprobs=logprobs)
