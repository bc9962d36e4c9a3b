"""Diagnostics of a step: entropy, distance to the behaviour policy, importance ratios, and what the algorithm
reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kestrl._shared.telemetry import ids_of, span, within
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import Group
from kestrl.storage.episodes import StoredGroup

QUANTILES = (0.01, 0.5, 0.99)
LOG_RATIO_BOUND = 20.0


def ratio_diagnostics(log_ratios: Tensor) -> dict[str, float]:
    """Statistics of the importance ratios policy / behaviour.

    `kl_behaviour` is the estimate k3 of KL(behaviour || policy) in nats per token, `ess` the effective sample size as a
    share of the tokens.

    Args:
        log_ratios: (N,): log-probability now minus that of the engine, of every sampled token.
    """
    if not len(log_ratios):
        return {}
    bounded = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratios = bounded.exp()
    ordered = ratios.sort().values
    last = len(ordered) - 1
    return {
        "kl_behaviour": float((ratios - 1.0 - bounded).mean()),
        "ess": float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)),
        "ratio_min": float(ordered[0]),
        **{f"ratio_p{int(share * 100):02d}": float(ordered[round(share * last)]) for share in QUANTILES},
        "ratio_max": float(ordered[-1]),
    }


class TokenMeans:
    """Means over all tokens of a step, micro-batch by micro-batch. Sums stay on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._on_device: list[tuple[str, Tensor]] = []
        self._counts: Counter[str] = Counter()

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Adds numbers by name, (N,) each."""
        for name, tensor in values.items():
            self._on_device.append((name, tensor.detach().sum()))
            self._counts[name] += tensor.numel()

    def settle(self) -> None:
        """Takes the sums to the CPU, in one transfer."""
        if self._on_device:
            names, sums = zip(*self._on_device, strict=True)
            totals = cast("list[float]", torch.stack(sums).tolist())  # pyright: ignore[reportUnknownMemberType]
            for name, total in zip(names, totals, strict=True):
                self._sums[name] += total
            self._on_device = []

    def merge(self, other: TokenMeans) -> None:
        """Adds the tokens of other means."""
        other.settle()
        for name, total in other._sums.items():
            self._sums[name] += total
        self._counts.update(other._counts)

    def means(self) -> dict[str, float]:
        """The mean of every name that has a token."""
        self.settle()
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}


def staleness_facts(ages: Sequence[Mapping[int, int]], groups: Sequence[Group], stale_seconds: float) -> dict[str, Any]:
    """The groups of a step by the age in steps of their oldest token, their tokens by age, and the share of episode
    time that went into stale groups.

    Args:
        ages: Of each trained group: number of its tokens by the steps between their version and the newest.
        groups: The trained groups.
        stale_seconds: Running time of groups that were released as too old since the last step.
    """
    spent = sum(_seconds(group) for group in groups)
    tokens = sum((Counter(group_ages) for group_ages in ages), Counter[int]())
    return {
        "by_staleness": _histogram(Counter(max(group_ages) for group_ages in ages)),
        "tokens_by_staleness": _histogram(tokens),
        "stale_share": stale_seconds / max(stale_seconds + spent, 1e-9),
    }


def _histogram(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(age): count for age, count in sorted(counts.items())}


def _seconds(group: Group) -> float:
    """From the start of a group's first episode to the end of its last."""
    if not group.episodes:
        return 0.0
    begin = min(episode.started_at for episode in group.episodes)
    return max(0.0, max(episode.started_at + episode.seconds for episode in group.episodes) - begin)


def trace_advantages(step: int, groups: Sequence[StoredGroup]) -> None:
    """A span for each episode that a step has trained on, in the trace of its group, which ended before the advantage
    was known.

    Args:
        step: Number of the step.
        groups: Its groups, with what was computed on their tokens.
    """
    for stored in groups:
        root = ids_of(stored.group.id)
        for episode in stored.group.episodes:
            tokens = stored.tokens.get(episode.id)
            if tokens is None or not tokens.advantages or episode.trace_id != root.split("-")[1]:
                continue
            facts: dict[str, str | float] = {
                Attr.STEP: step,
                Attr.EPISODE_ID: episode.id,
                Attr.ADVANTAGE: max(map(abs, tokens.advantages)),
            }
            if episode.reward is not None:
                facts[Attr.REWARD] = episode.reward
            with within(root), span(SpanName.ADVANTAGE, facts):
                pass
