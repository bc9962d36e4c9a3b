"""The forward passes of a batch, and their shares by rank.

With a sharded model every pass is a sequence of collectives, so that all ranks must run passes of the same kind in the
same order: a rank that has fewer of a kind runs empty ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.rows import PASS_COST, TrainRow
from kestrl_learner.ranks.group import Ranks

Key = tuple[int, int]
"""Number of a group in the step's batch, and of an episode in the group."""


class PassKind(NamedTuple):
    """What determines the collectives of a pass."""

    shared: bool
    """Whether the prompt is computed first, in a call of its own."""
    backward: bool
    """Whether there is a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Parts of some groups, which one forward pass computes."""

    pieces: Sequence[Piece]
    kind: PassKind
    tokens: int
    """Tokens to compute, padding included."""

    @property
    def rows(self) -> list[TrainRow]:
        """The rows of all pieces, in the order of their tokens."""
        return [row for piece in self.pieces for row in piece.rows]

    @property
    def cost(self) -> int:
        """Tokens, and the fixed cost of a pass."""
        return PASS_COST + self.tokens

    @property
    def episodes(self) -> list[tuple[Key, int]]:
        """Key and sampled tokens of each episode, in the order of their tokens."""
        return [episode for piece in self.pieces for episode in piece.episodes]


def by_episode(passes: Sequence[Pass], values: Sequence[Tensor]) -> dict[Key, Tensor]:
    """The values of each episode's tokens.

    Args:
        passes: What was computed.
        values: (N,) of the sampled tokens of each pass.
    """
    values_of_episodes: dict[Key, Tensor] = {}
    for one_pass, tensor in zip(passes, values, strict=True):
        episodes = one_pass.episodes
        sizes = [count for _, count in episodes]
        parts = cast("Sequence[Tensor]", tensor.split(sizes))  # pyright: ignore[reportUnknownMemberType]
        values_of_episodes |= {key: part for (key, _), part in zip(episodes, parts, strict=True)}
    return values_of_episodes


def of_pass(values: Mapping[Key, Tensor], one_pass: Pass) -> Tensor:
    """The inverse of `by_episode` for one pass, (N,)."""
    return torch.cat([values[key] for key, _ in one_pass.episodes])


def computed_share(passes: Sequence[Pass]) -> float:
    """Tokens that passes compute, in tokens of their rows with a prompt each: below 1 where rows share a computed
    prompt, above 1 where padding is computed.
    """
    pieces = [piece for one_pass in passes for piece in one_pass.pieces]
    plain = sum(len(piece.group.prompt) + len(row.token_ids) for piece in pieces for row in piece.rows)
    return sum(one_pass.tokens for one_pass in passes) / max(1, plain)


def deal(costs: Sequence[int], count: int) -> list[list[int]]:
    """Indices of passes by rank, each in ascending order: the most costly is dealt first, each to the rank with the
    least cost so far (Graham 1969: at most 4/3 of the best possible).
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(count), key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def schedule(passes: Sequence[Pass], ranks: Ranks) -> Iterator[tuple[PassKind, Pass | None]]:
    """The passes of this rank in the order in which to run them; None is an empty pass.

    One rank runs all passes in their order. Several run kind after kind, each as often as the rank with the most passes
    of that kind.
    """
    if ranks.count == 1:
        yield from ((one_pass.kind, one_pass) for one_pass in passes)
        return
    for kind in sorted({one_pass.kind for one_pass in passes}):
        of_kind = [one_pass for one_pass in passes if one_pass.kind == kind]
        shares = deal([one_pass.cost for one_pass in of_kind], ranks.count)
        of_rank = [of_kind[index] for index in shares[ranks.rank]]
        yield from ((kind, one_pass) for one_pass in of_rank)
        yield from [(kind, None)] * (max(map(len, shares)) - len(of_rank))
