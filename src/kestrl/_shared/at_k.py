"""Estimates over several samples of each question: mean@K, pass@k, maj@K and best@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrl.episode import Episode, Group

CORRECT = "answer_correct"
"""The metric of an episode by which its answer is correct, at 1."""


def unbiased_pass(samples: int, correct: int, k: int) -> float:
    """Estimated probability that one of k samples is correct: `1 - C(n - c, k) / C(n, k)`.

    Source: Chen et al. 2021 (arXiv 2107.03374, eq. 1). Equal to the share of the subsets of k samples with a correct
    one.

    Args:
        samples: Samples n of a question.
        correct: Correct ones c among them.
        k: From 1 to n.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def unbiased_best(values: Sequence[float], k: int) -> float:
    """Expected maximum of k of the values, drawn without replacement: the i-th smallest of n is the maximum of
    `C(i - 1, k - 1)` of the `C(n, k)` subsets.
    """
    subsets = math.comb(len(values), k)
    return math.fsum(value * math.comb(rank, k - 1) / subsets for rank, value in enumerate(sorted(values)))


def majority(votes: Sequence[tuple[str, float]]) -> float:
    """Correctness of the most frequent answer; the mean over the most frequent ones where several are.

    Args:
        votes: Answer and correctness (0 to 1) of each sample. Samples without an answer vote for the empty one. Equal
            answers that were judged differently count with the mean of their correctness.
    """
    by_answer: dict[str, list[float]] = {}
    for answer, correct in votes:
        by_answer.setdefault(answer, []).append(correct)
    largest_count = max(map(len, by_answer.values()))
    first = [math.fsum(values) / largest_count for values in by_answer.values() if len(values) == largest_count]
    return math.fsum(first) / len(first)


@dataclass(frozen=True, slots=True)
class _Question:
    """The scored samples of a question."""

    rewards: Sequence[float]
    correct: Sequence[float]
    """Empty unless every sample reports it."""
    answers: Sequence[str]
    """Empty unless a reward reads answers."""


def at_k(groups: Sequence[Group], samples: int) -> dict[str, float]:
    """The estimates over the questions of an evaluation, by name, such as `pass@4`; empty for one sample.

    k is every power of two below the number of samples, from 2, and the number itself. A question of which fewer
    episodes were scored counts where it has k of them; `incomplete_questions` is their number, if there are any.

    Args:
        groups: Groups of the evaluation; the samples of a question are in one or more of them.
        samples: Samples K that each question was to have.
    """
    if samples < 2:
        return {}
    values = {
        name: math.fsum(estimate.values()) / len(estimate) for name, estimate in estimates(groups, samples).items()
    }
    incomplete = sum(0 < len(episodes) < samples for episodes in _scored(groups).values())
    return {**values, **({"incomplete_questions": float(incomplete)} if incomplete else {})}


def estimates(groups: Sequence[Group], samples: int) -> dict[str, dict[int, float]]:
    """The estimates of `at_k` for each question that has one, by its ordinal; empty for one sample."""
    if samples < 2:
        return {}
    questions = {name: _question(episodes) for name, episodes in _scored(groups).items() if episodes}
    judged = {name: question for name, question in questions.items() if question.correct}
    complete_questions = {name: question for name, question in judged.items() if len(question.correct) == samples}
    values = {
        f"mean@{samples}": {
            name: math.fsum(question.correct) / samples for name, question in complete_questions.items()
        },
        f"maj@{samples}": {
            name: majority([*zip(question.answers, question.correct, strict=True)])
            for name, question in complete_questions.items()
            if question.answers
        },
    }
    for k in _sizes(samples):
        values[f"pass@{k}"] = {
            name: unbiased_pass(len(question.correct), sum(value >= 1 for value in question.correct), k)
            for name, question in judged.items()
            if len(question.correct) >= k
        }
        values[f"best@{k}"] = {
            name: unbiased_best(question.rewards, k)
            for name, question in questions.items()
            if len(question.rewards) >= k
        }
    return {name: by_question for name, by_question in values.items() if by_question}


def _sizes(samples: int) -> list[int]:
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


def _scored(groups: Sequence[Group]) -> Mapping[int, list[Episode]]:
    """The scored episodes by the ordinal of their question."""
    by_ordinal: dict[int, list[Episode]] = {}
    for group in groups:
        by_ordinal.setdefault(group.scenario.ordinal, []).extend(
            episode for episode in group.episodes if episode.failure is None and episode.reward is not None
        )
    return by_ordinal


def _question(episodes: Sequence[Episode]) -> _Question:
    reports = all(CORRECT in episode.metrics for episode in episodes)
    reads = any(episode.answer is not None for episode in episodes)
    return _Question(
        rewards=[episode.reward for episode in episodes if episode.reward is not None],
        correct=[episode.metrics[CORRECT] for episode in episodes] if reports else (),
        answers=[episode.answer or "" for episode in episodes] if reads else (),
    )
