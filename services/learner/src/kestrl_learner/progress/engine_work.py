"""What each engine did: its server's counts, and what the turns of the episodes asked of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kestrl.episode import Episode, Group, Row, Turn
from kestrl.runstate.work import EngineWork

COMPARED_ROWS = 16
"""Rows of an episode that the beginning of another one is compared with."""
ROUNDED = 1.0
"""Seconds by which the time with a request, a difference of rounded numbers, may seem to fall."""


@dataclass(slots=True)
class WorkCounts:
    """Sums the work of engines between two laps. Not for several threads."""

    _seen: dict[str, EngineWork] = field(default_factory=dict[str, EngineWork])
    """Counts of each engine's server at the last look."""
    _lap: dict[str, EngineWork] = field(default_factory=dict[str, EngineWork])

    def observe(self, engine: str, counts: EngineWork) -> None:
        """Takes the counts of an engine's server, which grow until it starts anew.

        What it did before the first look belongs to another process of the learner, or is the proof of a version.
        """
        before = self._seen.get(engine)
        self._seen[engine] = counts
        if before is not None:
            self._add(engine, counts if started_anew(counts, before) else counts.minus(before))

    def forget(self, engine: str) -> None:
        """Discards the counts of an engine that has left."""
        self._seen.pop(engine, None)

    def add(self, group: Group) -> None:
        """Counts the turns of a group."""
        for engine, work in turn_work(group):
            self._add(engine, work)

    def lap(self) -> dict[str, EngineWork]:
        """The work since the last lap, by engine; without engines that did nothing."""
        lap, self._lap = self._lap, {}
        return {engine: work for engine, work in lap.items() if work != EngineWork()}

    def _add(self, engine: str, work: EngineWork) -> None:
        self._lap[engine] = self._lap.get(engine, EngineWork()).plus(work)


def started_anew(counts: EngineWork, before: EngineWork) -> bool:
    """Whether counts that never fall are smaller than before. Pure. (Seconds of decoding may be what others leave of a
    sum, and fall.)
    """
    return (
        counts.prompt_tokens < before.prompt_tokens
        or counts.sampled_tokens < before.sampled_tokens
        or counts.busy_seconds < before.busy_seconds - ROUNDED
    )


def turn_work(group: Group) -> Iterator[tuple[str, EngineWork]]:
    """What each turn of a group asked of its engine: the tokens of its prompt, and how many of them an earlier turn of
    the group had begun with. Pure. A turn that lies outside of its row, which no step takes, is not counted.
    """
    first: array[int] | None = None
    for episode in group.episodes:
        ends: dict[int, int] = {}
        for turn in episode.turns:
            prompt = _prompt(episode, turn)
            if prompt is None:
                continue
            if turn.row in ends:
                repeated = min(ends[turn.row], len(prompt))
            else:
                continued = (episode.rows[row].token_ids[:end] for row, end in list(ends.items())[-COMPARED_ROWS:])
                repeated = max((common(prompt, other) for other in (first, *continued) if other is not None), default=0)
            ends[turn.row] = turn.end
            first = prompt if first is None else first
            yield turn.engine, EngineWork(turn_tokens=len(prompt), repeated_tokens=repeated)


def _prompt(episode: Episode, turn: Turn) -> array[int] | None:
    rows: Sequence[Row] = episode.rows
    if not 0 <= turn.row < len(rows) or not 0 <= turn.start <= turn.end <= len(rows[turn.row].token_ids):
        return None
    return rows[turn.row].token_ids[: turn.start]


def common(first: array[int], second: array[int]) -> int:
    """Number of tokens with which both begin."""
    one, other, size = first.tobytes(), second.tobytes(), first.itemsize
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[: length * size] != other[: length * size])
