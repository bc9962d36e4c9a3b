"""Questions that two policies answered differently. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrl._app.local.uncertainty import Values, values_of
from kestrl._shared.at_k import CORRECT
from kestrl.episode import Episode, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A question whose metric differs between two policies."""

    scenario: str
    question: str
    """The last user message of the prompt."""
    before: float
    """Mean of the first policy's samples."""
    after: float
    """Mean of the second policy's samples."""
    episodes_before: tuple[str, ...]
    """Ids of the first policy's episodes."""
    episodes_after: tuple[str, ...]
    """Ids of the second policy's episodes."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def flip_metric(one: Mapping[str, Values], other: Mapping[str, Values]) -> str:
    """The metric that questions are compared by: whether the answer is correct, where both know it, or the reward."""
    return CORRECT if one.get(CORRECT) and other.get(CORRECT) else "reward"


def flips(one: Sequence[Group], other: Sequence[Group], metric: str) -> list[Flip]:
    """The questions that both answered and whose metric differs, the largest differences first; where they are equal,
    those that became worse come first.

    Args:
        one: Groups of the first evaluation.
        other: Groups of the second evaluation, of the same questions.
        metric: Name of a metric, or `reward`.
    """
    before, after = (values_of(groups).get(metric, {}) for groups in (one, other))
    firsts, seconds = _by_question(one), _by_question(other)
    differing = [question for question in before.keys() & after.keys() if before[question] != after[question]]
    compared = [
        Flip(
            scenario=seconds[question][0].scenario.id,
            question=_text(seconds[question][0]),
            before=before[question],
            after=after[question],
            episodes_before=_ids(firsts[question]),
            episodes_after=_ids(seconds[question]),
        )
        for question in sorted(differing)
    ]
    return sorted(compared, key=lambda flip: (-abs(flip.difference), flip.difference))


def _by_question(groups: Sequence[Group]) -> dict[int, list[Group]]:
    by_question: dict[int, list[Group]] = {}
    for group in groups:
        by_question.setdefault(group.scenario.ordinal, []).append(group)
    return by_question


def _text(group: Group) -> str:
    return next((message["content"] for message in reversed(group.scenario.messages) if message["role"] == "user"), "")


def _ids(groups: Sequence[Group]) -> tuple[str, ...]:
    return tuple(episode.id for group in groups for episode in group.episodes if _scored(episode))


def _scored(episode: Episode) -> bool:
    return episode.failure is None and episode.reward is not None
