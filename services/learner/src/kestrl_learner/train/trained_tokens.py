"""What a step computed on the sampled tokens of each episode, to be stored with it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from kestrl.storage.episodes import TrainedTokens
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.train.passes import Key


def trained_tokens(
    groups: Sequence[TrainGroup], differences: Mapping[Key, Tensor]
) -> Sequence[Mapping[int, TrainedTokens]]:
    """Advantages and the learner's log-probs of every group's episodes, by position in the group.

    Args:
        groups: The batch with its advantages.
        differences: (N,) learner minus engine log-probs of each episode's sampled tokens, on the CPU.
    """
    return [_of_group(group, number, differences) for number, group in enumerate(groups)]


def _of_group(group: TrainGroup, number: int, differences: Mapping[Key, Tensor]) -> dict[int, TrainedTokens]:
    tokens: dict[int, TrainedTokens] = {}
    for sequence in sorted({row.sequence for row in group.rows}):
        rows = [row for row in group.rows if row.sequence == sequence]
        difference = differences.get((number, sequence))
        apart = cast("list[float]", [] if difference is None else difference.tolist())  # pyright: ignore[reportUnknownMemberType]
        behaviour = [value for row in rows for value, on in zip(row.behaviour, row.mask, strict=True) if on]
        advantages = [value for row in rows for value, on in zip(row.advantages, row.mask, strict=True) if on]
        logprobs = [logprob + offset for logprob, offset in zip(behaviour, apart, strict=True)]
        tokens[sequence] = TrainedTokens(advantages=array("f", advantages), learner_logprobs=array("f", logprobs))
    return tokens
