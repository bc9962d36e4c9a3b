"""Sampled tokens of training rows: their values in row order, their counts and where they come from. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kestrl.algorithms import Totals
from kestrl_learner.batch import TrainGroup, TrainRow


def stream(rows: Sequence[TrainRow], values: Sequence[Sequence[float]]) -> list[float]:
    """Values of the sampled tokens of rows, in row order."""
    return [
        value
        for row, listed in zip(rows, values, strict=True)
        for value, on in zip(listed, row.mask, strict=True)
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
    """Rows of older policies, by policy: the fewest rows that cover each of its engines.

    Rows of one group stay together, so that they share their prompt and a pass.
    """
    seen: dict[str, set[str]] = {}
    chosen: dict[str, list[TrainGroup]] = {}
    for group in groups:
        rows: dict[str, list[TrainRow]] = {}
        for row in group.rows:
            if row.on_policy or not row.policy:
                continue
            known = seen.setdefault(row.policy, set())
            if not known.issuperset(row.engines):
                known.update(row.engines)
                rows.setdefault(row.policy, []).append(row)
        for policy, some in rows.items():
            chosen.setdefault(policy, []).append(replace(group, rows=some))
    return chosen
