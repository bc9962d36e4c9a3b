"""What forward passes of a step show, and the log-ratios to the reference policy of a group's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.batch.tokens import stream, token_origins
from kestrl_learner.train.diagnostics import TokenMeans
from kestrl_learner.train.logprob_mismatch import LogprobMismatch, measure
from kestrl_learner.train.passes import Key, Pass, by_episode, of_pass


class Computed(NamedTuple):
    """A forward pass and its sampled tokens."""

    which: Pass
    logprobs: Tensor
    """(N,), with gradient if the pass has a backward pass."""
    entropy: Tensor | None
    """(N,), if it was asked for."""


class Observed:
    """What the first forward passes of a step show: log-prob differences to the engines by episode, and entropies.

    The tensors of passes stay on their device until all have been computed.
    """

    def __init__(self) -> None:
        self.differences: dict[Key, Tensor] = {}
        self.means = TokenMeans()
        self._passes: list[tuple[Pass, Tensor]] = []

    def add(self, computed: Computed, behaviour: Tensor) -> None:
        """Adds a pass.

        Args:
            computed: With entropies.
            behaviour: (N,) the engines' log-probs.
        """
        assert computed.entropy is not None, "an observed pass has entropies"
        self._passes.append((computed.which, computed.logprobs.detach() - behaviour))
        self.means.add({"entropy": computed.entropy})

    def settle(self) -> None:
        """Takes what passes showed to the CPU, in one transfer."""
        if not self._passes:
            return
        passes, values = zip(*self._passes, strict=True)
        sizes = [len(value) for value in values]
        split = torch.cat(values).cpu().split(sizes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self.differences |= by_episode(passes, cast("Sequence[Tensor]", split))
        self._passes = []

    def mismatch(
        self, passes: Sequence[Pass], older: Sequence[tuple[Tensor, Sequence[str]]]
    ) -> tuple[LogprobMismatch, Tensor]:
        """The log-prob mismatch of the step's passes, and the differences, (N,).

        Args:
            passes: All passes of the batch.
            older: Differences to the older policies that sampled the tokens, as `measure` takes them.
        """
        differences = [of_pass(self.differences, one_pass) for one_pass in passes]
        on_policy = [
            torch.tensor([on for row in one_pass.rows for on in row.on_policy], dtype=torch.bool) for one_pass in passes
        ]
        engines = [[name for row in one_pass.rows for name in token_origins(row)] for one_pass in passes]
        return measure(differences, on_policy, engines, older), torch.cat([torch.empty(0), *differences])


def with_log_ratios(group: TrainGroup, index: int, references: Mapping[Key, Tensor]) -> TrainGroup:
    """The group whose episodes have log(behaviour / reference) of each of their tokens.

    Args:
        group: With its scored episodes.
        index: Its number in the batch.
        references: (N,) log-probs of the reference policy, of each episode.
    """
    episodes = [
        replace(episode, log_ratios=_log_ratios([row for row in group.rows if row.sequence == number], reference))
        for number, episode in enumerate(group.episodes)
        for reference in [references.get((index, number), torch.empty(0))]
    ]
    return replace(group, episodes=episodes)


def _log_ratios(rows: Sequence[TrainRow], reference: Tensor) -> list[float]:
    behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), dtype=torch.float64)
    return [float(value) for value in behaviour - reference.cpu()]
