"""What forward passes of a step show, and the log-ratios to the reference policy of a group's episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.batch.tokens import stream, token_origins
from kestrl_learner.train.diagnostics import TokenMeans
from kestrl_learner.train.logprob_mismatch import LogprobMismatch, measure
from kestrl_learner.train.passes import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A group with the log-probabilities that do not change within a step. Each list has a tensor (N,) for every part
    that `PolicyModel.logprobs` cuts the group into.
    """

    index: int
    """Number of the group in the step's batch."""
    group: TrainGroup
    references: Sequence[Tensor] | None
    """Those of the reference policy; None unless the algorithm needs it."""
    old: Sequence[Tensor] | None
    """Those of the weights that the step began with; None in a step of one update, where they are the current ones."""


class Computed(NamedTuple):
    """A forward pass and its sampled tokens."""

    which: Pass
    logprobs: Tensor
    """(N,), with gradient if the pass has a backward pass."""
    entropy: Tensor | None
    """(N,), if it was asked for."""


class Observed:
    """What the first forward passes of a step show: log-prob differences to the engines by pass, and entropies."""

    def __init__(self) -> None:
        self.differences: dict[tuple[int, int], Tensor] = {}
        self.means = TokenMeans()

    def add(self, computed: Computed, behaviour: Tensor) -> None:
        """Adds a pass.

        Args:
            computed: With entropies.
            behaviour: (N,) the engines' log-probs.
        """
        assert computed.entropy is not None, "an observed pass has entropies"
        self.differences[computed.which.key] = (computed.logprobs.detach() - behaviour).cpu()
        self.means.add({"entropy": computed.entropy})

    def mismatch(
        self, passes: Sequence[Pass], older: Sequence[tuple[Tensor, Sequence[str]]]
    ) -> tuple[LogprobMismatch, Tensor]:
        """The log-prob mismatch of the step's passes, and the differences, (N,).

        Args:
            passes: All passes of the batch.
            older: Differences to the older policies that sampled the tokens, as `measure` takes them.
        """
        differences = [self.differences[each.key] for each in passes]
        on_policy = [
            torch.tensor(stream(each.rows, [[row.on_policy] * len(row.mask) for row in each.rows])) > 0
            for each in passes
        ]
        engines = [[name for row in each.rows for name in token_origins(row)] for each in passes]
        return measure(differences, on_policy, engines, older), torch.cat([torch.empty(0), *differences])


def with_log_ratios(
    group: TrainGroup, parts: Sequence[tuple[Sequence[TrainRow], Sequence[int]]], references: Sequence[Tensor]
) -> TrainGroup:
    """The group whose episodes have log(behaviour / reference) of each of their tokens.

    Args:
        group: With its scored episodes.
        parts: As `PolicyModel.parts` cuts the group.
        references: (N,) log-probs of the reference policy, of each part.
    """
    by_row: dict[int, list[float]] = {}
    for (rows, sizes), reference in zip(parts, references, strict=True):
        behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), dtype=torch.float64)
        ratios = iter([float(value) for value in behaviour - reference.cpu()])
        by_row |= {id(row): list(islice(ratios, size)) for row, size in zip(rows, sizes, strict=True)}
    episodes = [
        replace(
            episode,
            log_ratios=[value for row in group.rows if row.sequence == number for value in by_row[id(row)]],
        )
        for number, episode in enumerate(group.episodes)
    ]
    return replace(group, episodes=episodes)
