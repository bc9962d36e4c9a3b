"""Sampled tokens of training rows: their values in row order, their counts and where they come from. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kestrl.algorithms import Totals
from kestrl_learner.batch.rows import TrainGroup, TrainRow


def stream(rows: Sequence[TrainRow], values: Sequence[Sequence[float]]) -> list[float]:
    """Values of the sampled tokens of rows, in row order."""
    return [
        value
        for row, row_values in zip(rows, values, strict=True)
        for value, on in zip(row_values, row.mask, strict=True)
        if on
    ]


def sequence_tokens(group: TrainGroup) -> dict[int, int]:
    """Number of sampled tokens by episode, without episodes that have none."""
    tokens: Counter[int] = Counter()
    for row in group.rows:
        tokens[row.sequence] += sum(row.mask)
    return {sequence: count for sequence, count in tokens.items() if count}


def totals_of(groups: Sequence[TrainGroup]) -> Totals:
    """Token, sequence and group counts over a batch."""
    episodes = [sequence_tokens(group) for group in groups]
    return Totals(
        tokens=sum(sum(tokens.values()) for tokens in episodes),
        sequences=sum(map(len, episodes)),
        groups=len(groups),
    )


def token_origins(row: TrainRow) -> list[str]:
    """Engine and policy of each of a row's sampled tokens, as text."""
    return [f"{engine} on {row.policy}" for engine in row.engines]


def stale_rows(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    """Rows of older policies, by policy: the first and the last ones that cover each of its engines.

    Both ends, since an engine may have got other weights in the midst of a policy's rollouts. Rows of one group stay
    together, so that they share their prompt and a pass.
    """
    places = [(number, place) for number, group in enumerate(groups) for place in range(len(group.rows))]
    covering_places = _covering(groups, places) | _covering(groups, places[::-1])
    groups_by_policy: dict[str, list[TrainGroup]] = {}
    for number, group in enumerate(groups):
        rows: dict[str, list[TrainRow]] = {}
        for place, row in enumerate(group.rows):
            if (number, place) in covering_places:
                rows.setdefault(row.policy, []).append(row)
        for policy, policy_rows in rows.items():
            groups_by_policy.setdefault(policy, []).append(replace(group, rows=policy_rows))
    return groups_by_policy


def _covering(groups: Sequence[TrainGroup], places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Places (group, row) of the first rows, in this order, that cover each engine of each older policy."""
    engines_by_policy: dict[str, set[str]] = {}
    covering_places: set[tuple[int, int]] = set()
    for number, place in places:
        row = groups[number].rows[place]
        if row.on_policy or not row.policy:
            continue
        covered_engines = engines_by_policy.setdefault(row.policy, set())
        if not covered_engines.issuperset(row.engines):
            covered_engines.update(row.engines)
            covering_places.add((number, place))
    return covering_places
