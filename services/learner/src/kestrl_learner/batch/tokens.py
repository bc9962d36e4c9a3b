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
    return [f"{engine} on {policy}" for engine, policy in zip(row.engines, row.policies, strict=True)]


def older_origins(row: TrainRow) -> set[tuple[str, str]]:
    """Policy and engine of a row's tokens that a known older policy sampled."""
    origins = zip(row.policies, row.engines, row.on_policy, strict=True)
    return {(policy, engine) for policy, engine, is_newest in origins if policy and not is_newest}


def stale_rows(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    """Rows with tokens of older policies, by policy: the first and the last ones that cover each of its engines.

    Both ends, since an engine may have got other weights in the midst of a policy's rollouts. Rows of one group stay
    together, so that they share their prompt and a pass. A row whose turns have several policies may be under each.
    """
    places = [(number, place) for number, group in enumerate(groups) for place in range(len(group.rows))]
    covering_places = _covering(groups, places) | _covering(groups, places[::-1])
    groups_by_policy: dict[str, list[TrainGroup]] = {}
    for number, group in enumerate(groups):
        rows: dict[str, list[TrainRow]] = {}
        for place, row in enumerate(group.rows):
            for policy in sorted({policy for policy, _ in older_origins(row)}):
                if (number, place, policy) in covering_places:
                    rows.setdefault(policy, []).append(row)
        for policy, policy_rows in rows.items():
            groups_by_policy.setdefault(policy, []).append(replace(group, rows=policy_rows))
    return groups_by_policy


def _covering(groups: Sequence[TrainGroup], places: Sequence[tuple[int, int]]) -> set[tuple[int, int, str]]:
    """Group, row and policy of the first rows, in this order, that cover each engine of each older policy."""
    covered_origins: set[tuple[str, str]] = set()
    covering_places: set[tuple[int, int, str]] = set()
    for number, place in places:
        new_origins = older_origins(groups[number].rows[place]) - covered_origins
        covered_origins |= new_origins
        covering_places |= {(number, place, policy) for policy, _ in new_origins}
    return covering_places
