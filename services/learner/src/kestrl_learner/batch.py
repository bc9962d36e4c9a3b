"""From scored groups to what the trainer sees: rows with per-token streams, the group's shared prompt beside them. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.episode import Episode, Group
from kestrl_learner.algo.advantages import ADVANTAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One row after the shared prompt. All arrays have the row's length without the prompt."""

    token_ids: array[int]
    mask: bytes
    behaviour: array[float]
    advantage: float
    """The episode's, the same for all of its sampled tokens and rows."""
    fresh: bool
    """Whether the newest policy sampled all of it."""
    policy: str
    """The one that sampled it; none where several did."""
    engines: Sequence[str]
    """Which engine sampled each of the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """The rows of a group and the prompt they share."""

    id: str
    prompt: array[int]
    rows: Sequence[TrainRow]

    @property
    def sampled(self) -> int:
        """Sampled tokens."""
        return sum(sum(row.mask) for row in self.rows)

    @property
    def idle(self) -> bool:
        """Whether no row has an advantage: nothing to learn, only to compare."""
        return all(row.advantage == 0.0 for row in self.rows)


def shared_prompt(rows: Sequence[tuple[array[int], bytes]]) -> int:
    """Length of the longest prefix that all rows share and none sampled any of. At least one token stays outside it."""
    if not rows:
        return 0
    first = rows[0][0]
    limit = min(min(mask.find(1) if 1 in mask else len(mask), len(ids) - 1) for ids, mask in rows)
    for position in range(limit):
        if any(ids[position] != first[position] for ids, _ in rows[1:]):
            return position
    return max(0, limit)


PASS_COST = 128
"""What a forward and backward pass costs beside its tokens, in tokens (measured on a CPU: some 30 ms of small operations)."""


def cut(lengths: Sequence[int], *, prompt: int, limit: int) -> list[slice]:
    """Cuts rows into the parts that together cost least: few passes, little padding.

    A part costs its prompt and its rows, each padded to the longest of them. Exact, by dynamic programming over where the last part begins.

    Args:
        lengths: Of the rows after the prompt, ascending.
        prompt: Length of the prompt, computed once a part.
        limit: Tokens of a part at most, padding included; a single row may have more.
    """
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        longest = lengths[end - 1]
        most = max(1, (limit - prompt) // max(1, longest))
        begins = range(max(0, end - most), end)
        best.append(min((best[begin][0] + PASS_COST + prompt + (end - begin) * longest, begin) for begin in begins))
    parts: list[slice] = []
    end = len(lengths)
    while end:
        begin = best[end][1]
        parts.append(slice(begin, end))
        end = begin
    return parts[::-1]


def sampled_by(episode: Episode, row: int) -> Sequence[str]:
    """The engine of each sampled token of a row, as the episode's turns tell."""
    mask = episode.rows[row].mask
    names = [""] * len(mask)
    for turn in episode.turns:
        if turn.row == row:
            names[turn.start : turn.end] = [turn.engine] * (turn.end - turn.start)
    return [name for name, on in zip(names, mask, strict=True) if on]


def train_group(group: Group, estimator: str, policy: str) -> TrainGroup:
    """A group for the trainer: advantages over its episodes, each episode's copied to all of its rows.

    Args:
        group: Scored; every episode has a reward.
        estimator: Name in `ADVANTAGES`.
        policy: Name of the newest policy version.
    """
    rewards = [episode.reward for episode in group.episodes]
    known = [reward for reward in rewards if reward is not None]
    assert len(known) == len(rewards), "an episode without a reward never comes here"
    advantages = ADVANTAGES[estimator](known)
    given = [
        (row, advantage, sampled_by(episode, index))
        for episode, advantage in zip(group.episodes, advantages, strict=True)
        for index, row in enumerate(episode.rows)
    ]
    length = shared_prompt([(row.token_ids, row.mask) for row, *_ in given])
    rows = [
        TrainRow(
            token_ids=row.token_ids[length:],
            mask=row.mask[length:],
            behaviour=row.logprobs[length:],
            advantage=advantage,
            fresh=all(name == policy for name in row.policies),
            policy=row.policies[0] if len(set(row.policies)) == 1 else "",
            engines=engines,
        )
        for row, advantage, engines in given
    ]
    return TrainGroup(id=group.id, prompt=given[0][0].token_ids[:length] if given else array("i"), rows=rows)
