"""Choice of the episodes that a forward pass computes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kestrl_learner.batch.rows import PASS_COST, TrainGroup, TrainRow, bins


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a group that a pass computes, behind one prompt or each behind its own."""

    index: int
    """Number of the group in the step's batch."""
    group: TrainGroup
    rows: Sequence[TrainRow]
    """All rows of some of the group's episodes."""

    @property
    def episodes(self) -> list[tuple[tuple[int, int], int]]:
        """Key and sampled tokens of each episode, in the order of its tokens in the pass."""
        return [
            ((self.index, sequence), sum(sum(row.mask) for row in rows))
            for sequence, rows in groupby(self.rows, key=lambda row: row.sequence)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of a group."""

    prompt: int
    """Computed once in each pass that has episodes of the group."""
    episodes: Sequence[int]
    """Tokens of each episode."""
    limit: int
    """Largest number of tokens of a pass over this group; a single episode may have more."""


Chosen = list[tuple[int, list[int]]]
"""Numbers of groups, and of their episodes, in a pass."""


def filled(groups: Sequence[Sizes], *, joined: int, least_passes: int = 1) -> list[Chosen]:
    """The passes over the episodes of some groups, in the order of the groups.

    The cheaper of two: groups cut by themselves, whose parts are put together, and passes that are filled one after the
    other, each with what the one before does not hold, which repeats the prompts of the groups that are cut.

    Args:
        groups: Their tokens.
        joined: Largest number of tokens of a pass over several groups.
        least_passes: Number of passes, by the number of ranks, below which groups are not put together.
    """
    total = sum(size.prompt + sum(size.episodes) for size in groups)
    joined = min(joined, -(-total // least_passes))
    plans = (_joined_parts(groups, joined), _one_after_the_other(groups, joined))
    return sorted(min(plans, key=lambda plan: _cost(groups, plan)), key=lambda selection: selection[0])


def _tokens(groups: Sequence[Sizes], selection: Chosen) -> int:
    return sum(
        groups[number].prompt + sum(groups[number].episodes[position] for position in positions)
        for number, positions in selection
    )


def _cost(groups: Sequence[Sizes], plan: Sequence[Chosen]) -> int:
    return sum(PASS_COST + _tokens(groups, selection) for selection in plan)


def _joined_parts(groups: Sequence[Sizes], joined: int) -> list[Chosen]:
    parts = [
        (number, positions)
        for number, size in enumerate(groups)
        for positions in bins(size.episodes, limit=size.limit - size.prompt)
    ]
    sizes = [_tokens(groups, [part]) for part in parts]
    return [_merged([parts[place] for place in places]) for places in bins(sizes, limit=joined)]


def _merged(parts: Sequence[tuple[int, list[int]]]) -> Chosen:
    """The parts of a pass, with one of each group."""
    episodes: dict[int, list[int]] = {}
    for number, positions in parts:
        episodes.setdefault(number, []).extend(positions)
    return [(number, sorted(positions)) for number, positions in sorted(episodes.items())]


def _one_after_the_other(groups: Sequence[Sizes], joined: int) -> list[Chosen]:
    plan: list[Chosen] = []
    tokens_left = 0
    for number, size in enumerate(groups):
        has_prompt = False
        for episode, tokens in enumerate(size.episodes):
            needed = tokens if has_prompt else size.prompt + tokens
            if not plan or needed > tokens_left:
                plan.append([])
                tokens_left, has_prompt, needed = joined, False, size.prompt + tokens
            if not has_prompt:
                plan[-1].append((number, []))
                has_prompt = True
            plan[-1][-1][1].append(episode)
            tokens_left -= needed
    return plan
