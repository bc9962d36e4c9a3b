"""Uncertainty of evaluations: standard errors, and a paired test of two policies on the same questions. Pure.

The question is the unit: samples of one question are not independent, so each counts with its mean over them (Miller
2024, arXiv 2411.00640, on clustered standard errors and paired differences).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from kestrl._shared.at_k import estimates
from kestrl.episode import Episode, Group

Values = Mapping[int, float]
"""A metric by the ordinal of the question in the data."""
TESTED = ("reward", "answer_correct")
"""Metrics in which policies are compared."""
MOST_SUMS = 1 << 17
"""Distinct sums up to which the distribution of the paired test is exact."""
_RESOLUTION = 1e9


def values_of(groups: Sequence[Group], samples: int = 1) -> dict[str, dict[int, float]]:
    """Each metric's values: the mean over a question's scored episodes, and the estimates over several samples.

    Args:
        groups: Groups of one evaluation.
        samples: Samples of each question.
    """
    episodes: dict[int, list[Episode]] = {}
    for group in groups:
        scored = [
            entry_values
            for entry_values in group.episodes
            if entry_values.failure is None and entry_values.reward is not None
        ]
        if scored:
            episodes.setdefault(group.scenario.ordinal, []).extend(scored)
    metric_values: dict[str, dict[int, list[float]]] = {}
    for question, scored in episodes.items():
        for episode in scored:
            for name, value in {**episode.metrics, "reward": episode.reward or 0.0}.items():
                metric_values.setdefault(name, {}).setdefault(question, []).append(value)
    means = {
        name: {question: fmean(entry_values) for question, entry_values in by.items()}
        for name, by in metric_values.items()
    }
    return means | estimates(groups, samples)


def standard_error(values: Values) -> float | None:
    """Standard error of the mean over the questions; None for fewer than two."""
    return stdev(values.values()) / math.sqrt(len(values)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Two policies on the questions that both answered."""

    questions: int
    difference: float
    """Mean of the second's value minus the first's."""
    standard_error: float | None
    """Standard error of the difference; None for one question."""
    p: float
    """Probability of a difference at least as large, in either direction, if each question's sign were a coin's."""
    only_first: int
    """Questions that only the first answered."""
    only_second: int
    """Questions that only the second answered."""

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ±{self.standard_error:.3f}"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"{self.difference:+.3f}{error} over {self.questions} questions that both answered, {p}"


def paired(first: Values, second: Values) -> Paired | None:
    """The difference of two policies; None if they have no question in common.

    The p-value is that of the sign-flip test: under the hypothesis that the policies are equal, each question's
    difference has either sign with the same probability. It is exact while few sums are possible, as for answers that
    are right or wrong; else the normal approximation of the same test.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = {question: second[question] - first[question] for question in common}
    return Paired(
        questions=len(common),
        difference=fmean(differences.values()),
        standard_error=standard_error(differences),
        p=_sign_flip([*differences.values()]),
        only_first=len(first) - len(common),
        only_second=len(second) - len(common),
    )


def pairs_of(first: Mapping[str, Values], second: Mapping[str, Values], metrics: Sequence[str]) -> dict[str, Paired]:
    """The differences in those metrics that both have."""
    pairs = {name: paired(first.get(name, {}), second.get(name, {})) for name in metrics}
    return {name: pair for name, pair in pairs.items() if pair is not None}


def different_questions(pairs: Mapping[str, Paired], first: str, second: str) -> Iterator[str]:
    """A line where the two did not answer the same questions, so that their means are not over the same."""
    pair = next(iter(pairs.values()), None)
    if pair is not None and (pair.only_first or pair.only_second):
        yield (
            f"warning: {first} and {second} answered different questions, as episodes failed: {pair.only_first} "
            f"only by {first}, {pair.only_second} only by {second}; their means are not over the same ones"
        )


def _sign_flip(differences: Sequence[float]) -> float:
    steps = [round(abs(difference) * _RESOLUTION) for difference in differences]
    observed = abs(sum(round(difference * _RESOLUTION) for difference in differences))
    sums = {0: 1.0}
    for step in filter(None, steps):
        flipped: dict[int, float] = {}
        for value, weight in sums.items():
            for reached in (value - step, value + step):
                flipped[reached] = flipped.get(reached, 0.0) + weight / 2
        sums = flipped
        if len(sums) > MOST_SUMS:
            return math.erfc(observed / math.sqrt(2 * sum(difference * difference for difference in steps)))
    slack = len(differences)  # of rounding: equal sums may differ by one unit for each difference
    return min(1.0, math.fsum(weight for value, weight in sums.items() if abs(value) >= observed - slack))
