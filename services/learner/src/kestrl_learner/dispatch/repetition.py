"""Whether an episode would train a sampled token twice. Pure.

Every sampled token belongs to one turn, and every turn to one call, which its seed names. Two calls of one prompt may
well sample the same tokens: their seeds tell them apart. A copy of a turn in another row has no seed of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise

from kestrl.episode import Episode, Row, Turn


def repeated(episode: Episode) -> str:
    """Why a sampled token of an episode would be trained twice; empty if none would.

    Turns and masks are looked at as far as they lie within rows; what does not is another failure.
    """
    by_row: dict[int, list[Turn]] = defaultdict(list)
    for turn in episode.turns:
        by_row[turn.row].append(turn)
    for number, turns in by_row.items():
        turns.sort(key=lambda turn: (turn.start, turn.end))
        for first, second in pairwise(turns):
            if second.start < first.end:
                return (
                    f"{episode.id} has turns that overlap in row {number}: {first.start}-{first.end} and "
                    f"{second.start}-{second.end}"
                )
    seeds = [turn.seed for turn in episode.turns if turn.seed]
    if len(set(seeds)) < len(seeds):
        return f"{episode.id} has two turns of one seed, that is, of one call"
    for (first, turns), (second, second_turns) in combinations(sorted(by_row.items()), 2):
        if first >= 0 and second < len(episode.rows):
            shared = _shared(episode.rows[first], episode.rows[second])
            place = _copied(episode.rows, turns, second_turns, shared)
            if place is not None:
                return f"{episode.id} has token {place} of row {first} again in row {second}, sampled in both"
    return ""


def _shared(first: Row, second: Row) -> int:
    """Number of ids with which two rows begin alike, by halving: comparing memory is fast."""
    ids, second_ids = memoryview(first.token_ids).cast("B"), memoryview(second.token_ids).cast("B")
    size = first.token_ids.itemsize
    low, high = 0, min(len(first.token_ids), len(second.token_ids))
    while low < high:
        middle = (low + high + 1) // 2
        same = ids[low * size : middle * size] == second_ids[low * size : middle * size]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _copied(rows: Sequence[Row], turns: Sequence[Turn], other_turns: Sequence[Turn], shared: int) -> int | None:
    """The first token that two rows begin alike up to, and that both have sampled in turns without seeds of their
    own.
    """
    for turn in turns:
        for other in other_turns:
            start, end = max(0, turn.start, other.start), min(turn.end, other.end, shared)
            if start >= end or (turn.seed and other.seed):
                continue
            masks = zip(rows[turn.row].mask[start:end], rows[other.row].mask[start:end], strict=True)
            for place, (bit, other_bit) in enumerate(masks, start):
                if bit and other_bit:
                    return place
    return None
