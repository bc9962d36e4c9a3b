"""Training batches: the rows of scored groups with per-token arrays, and the prompt that a group's rows share. Free of
torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from kestrl.algorithms import Algorithm, RewardComponent, ScoredEpisode
from kestrl.episode import Episode, Group, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One row after the shared prompt. All arrays have the row's length without the prompt."""

    token_ids: array[int]
    mask: bytes
    behaviour: array[float]
    advantages: array[float]
    """Advantages of the sampled tokens; 0 elsewhere."""
    sequence: int
    """Index of the row's episode in the group."""
    on_policy: bytes
    """1 on each sampled token that the newest policy sampled, 0 on those of older ones."""
    policies: Sequence[str]
    """The policy version of each sampled token; empty where none is known."""
    engines: Sequence[str]
    """The engine of each sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """The rows of a group and the prompt they share."""

    id: str
    prompt: array[int]
    rows: Sequence[TrainRow]
    episodes: Sequence[ScoredEpisode] = ()
    """The scored episodes, by `TrainRow.sequence`, while their advantages are to be estimated; empty once the rows hold
    them."""

    @property
    def sampled(self) -> int:
        """Sampled tokens."""
        return sum(sum(row.mask) for row in self.rows)

    @property
    def zero_advantage(self) -> bool:
        """Whether all advantages are 0, so that the group adds nothing to the gradient of the policy loss."""
        return not any(any(row.advantages) for row in self.rows)


def plain_group(rows: Sequence[Sequence[int]], prompt: Sequence[int] = ()) -> TrainGroup:
    """A group of no episodes, whose rows are sampled from their second token on, without advantages.

    Args:
        rows: Token ids of each after the prompt.
        prompt: Token ids of the prompt.
    """
    return TrainGroup(
        id="",
        prompt=array("i", prompt),
        rows=[
            TrainRow(
                token_ids=array("i", ids),
                mask=b"\0" + b"\1" * (len(ids) - 1),
                behaviour=array("f", bytes(4 * len(ids))),
                advantages=array("d", bytes(8 * len(ids))),
                sequence=number,
                on_policy=b"\1" * (len(ids) - 1),
                policies=[""] * (len(ids) - 1),
                engines=[""] * (len(ids) - 1),
            )
            for number, ids in enumerate(rows)
        ],
    )


def rows_of_episodes(group: TrainGroup) -> list[list[TrainRow]]:
    """The rows of each episode of a group."""
    return [list(rows) for _, rows in groupby(group.rows, key=lambda row: row.sequence)]


def shared_prompt(rows: Sequence[tuple[array[int], bytes]]) -> int:
    """Length of the longest prefix that all rows share and that holds no sampled token. At least one token of each row
    stays outside.
    """
    if not rows:
        return 0
    first = rows[0][0]
    limit = min(min(mask.find(1) if 1 in mask else len(mask), len(ids) - 1) for ids, mask in rows)
    for position in range(limit):
        if any(ids[position] != first[position] for ids, _ in rows[1:]):
            return position
    return max(0, limit)


PASS_COST = 128
"""Fixed cost of a forward and backward pass, in tokens (measured on a CPU: some 30 ms of small operations)."""


def cut(lengths: Sequence[int], *, prompt: int, limit: int, rows: Sequence[int] | None = None) -> list[slice]:
    """Cuts episodes into the parts with the least total cost: few passes, little padding.

    A part costs its prompt and its rows, each padded to the longest of them. Exact, by dynamic programming over where
    the last part begins.

    Args:
        lengths: The longest row of each episode after the prompt, ascending.
        prompt: Length of the prompt, computed once a part.
        limit: Largest number of tokens of a part, padding included; a single episode may have more.
        rows: Rows of each episode, one each by default; the rows of an episode stay together.
    """
    counts = [0, *accumulate(rows or [1] * len(lengths))]
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        row_length = lengths[end - 1]
        options: list[tuple[int, int]] = []
        for begin in range(end - 1, -1, -1):
            size = prompt + (counts[end] - counts[begin]) * row_length
            if size > limit and begin < end - 1:
                break
            options.append((best[begin][0] + PASS_COST + size, begin))
        best.append(min(options))
    parts: list[slice] = []
    end = len(lengths)
    while end:
        begin = best[end][1]
        parts.append(slice(begin, end))
        end = begin
    return parts[::-1]


def bins(sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Indices of items by pass, each in ascending order: few passes, and of as similar sizes as that allows.

    As many passes as best fit decreasing needs, filled with the largest item first, each into the emptiest; where that
    brings a pass of several items over the limit, as best fit decreasing fills them.

    Args:
        sizes: Tokens of each item.
        limit: Largest number of tokens of a pass; a single item may have more.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    full: list[list[int]] = []
    full_loads: list[int] = []
    for index in order:
        fitting = [number for number, size in enumerate(full_loads) if size + sizes[index] <= limit]
        number = min(fitting, key=lambda number: (-full_loads[number], number), default=len(full))
        if number == len(full):
            full.append([])
            full_loads.append(0)
        full[number].append(index)
        full_loads[number] += sizes[index]
    even: list[list[int]] = [[] for _ in full]
    loads = [0] * len(full)
    for index in order:
        number = min(range(len(full)), key=lambda number: (loads[number], number))
        even[number].append(index)
        loads[number] += sizes[index]
    within = all(load <= limit or len(indices) == 1 for indices, load in zip(even, loads, strict=True))
    return [sorted(indices) for indices in (even if within else full)]


def turn_of_tokens(episode: Episode, row: int) -> Sequence[Turn]:
    """The turn of each sampled token of a row.

    Raises:
        ValueError: A sampled token belongs to no turn.
    """
    mask = episode.rows[row].mask
    turns: list[Turn | None] = [None] * len(mask)
    for turn in episode.turns:
        if turn.row == row:
            turns[turn.start : turn.end] = [turn] * (turn.end - turn.start)
    sampled_by = [turn for turn, on in zip(turns, mask, strict=True) if on and turn is not None]
    if len(sampled_by) != sum(mask):
        raise ValueError(f"row {row} of {episode.id} has sampled tokens that belong to no turn")
    return sampled_by


def scored_episode(episode: Episode) -> ScoredEpisode:
    """The parts of an episode that an advantage estimator uses."""
    assert episode.reward is not None, "an episode without a reward is never trained on"
    turns = sorted(episode.turns, key=lambda turn: (turn.row, turn.start))
    return ScoredEpisode(
        reward=episode.reward,
        turns=[sum(episode.rows[turn.row].mask[turn.start : turn.end]) for turn in turns],
        turn_rewards=[episode.turn_rewards[turn.index] for turn in turns] if episode.turn_rewards else (),
        components={
            name: RewardComponent(value=value, weight=episode.reward_weights[name])
            for name, value in episode.rewards.items()
            if name in episode.reward_weights
        },
    )


def train_batch(groups: Sequence[Group], algorithm: Algorithm, policy: str) -> list[TrainGroup]:
    """The groups of a step for the trainer, with the advantages of every sampled token, unless the algorithm needs the
    reference policy to estimate them.

    Args:
        groups: Scored; every episode has a reward.
        algorithm: Estimates the advantages over the whole batch.
        policy: Name of the newest policy version.

    Raises:
        ValueError: The algorithm returned another number of advantages than an episode has sampled tokens.
    """
    batch = [_train_group(group, policy) for group in groups]
    return batch if algorithm.needs_reference else estimated(batch, algorithm)


def estimated(batch: Sequence[TrainGroup], algorithm: Algorithm) -> list[TrainGroup]:
    """The groups with the algorithm's advantages.

    Raises:
        ValueError: The algorithm returned another number of advantages than an episode has sampled tokens.
    """
    advantages = algorithm.advantages([group.episodes for group in batch])
    return [
        _with_advantages(group, group_advantages) for group, group_advantages in zip(batch, advantages, strict=True)
    ]


def _with_advantages(group: TrainGroup, advantages: Sequence[Sequence[float]]) -> TrainGroup:
    for number, (episode, values) in enumerate(zip(group.episodes, advantages, strict=True)):
        if len(values) != episode.tokens:
            raise ValueError(
                f"episode {number} of {group.id} has {episode.tokens} sampled tokens and the algorithm gave "
                f"{len(values)} advantages"
            )
    remaining = [iter(values) for values in advantages]
    rows = [
        replace(row, advantages=array("d", (next(remaining[row.sequence]) if on else 0.0 for on in row.mask)))
        for row in group.rows
    ]
    return replace(group, rows=rows, episodes=())


def _train_group(group: Group, policy: str) -> TrainGroup:
    numbered_rows = [
        (row, number, turn_of_tokens(episode, index))
        for number, episode in enumerate(group.episodes)
        for index, row in enumerate(episode.rows)
    ]
    length = shared_prompt([(row.token_ids, row.mask) for row, *_ in numbered_rows])
    rows = [
        TrainRow(
            token_ids=row.token_ids[length:],
            mask=row.mask[length:],
            behaviour=row.logprobs[length:],
            advantages=array("d", bytes(8 * (len(row.mask) - length))),
            sequence=number,
            on_policy=bytes(turn.policy == policy for turn in turns),
            policies=[turn.policy for turn in turns],
            engines=[turn.engine for turn in turns],
        )
        for row, number, turns in numbered_rows
    ]
    return TrainGroup(
        id=group.id,
        prompt=numbered_rows[0][0].token_ids[:length] if numbered_rows else array("i"),
        rows=rows,
        episodes=[scored_episode(episode) for episode in group.episodes],
    )
