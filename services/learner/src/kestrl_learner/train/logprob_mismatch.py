"""Log-prob mismatch: how much the log-probabilities of learner and engines differ on the same tokens, and its
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from kestrl._shared.plan.settings.learner import GapBounds
from kestrl_learner.train.mismatch_stats import MismatchStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobMismatch:
    """Log-prob mismatch of a step."""

    all: MismatchStats
    """Mismatch of all tokens to the newest policy, which includes what was learned since they were sampled."""
    own: MismatchStats
    """Mismatch to the policy that sampled the tokens, which is rounding only: all tokens of the newest policy, some of
    older ones."""
    engines: Mapping[str, MismatchStats]
    """`own` by engine and policy."""

    def facts(self) -> dict[str, Any]:
        """The JSON form in `metrics/`."""
        engines = {name: asdict(stats) for name, stats in self.engines.items()}
        return {**asdict(self.all), "own": asdict(self.own), "engines": engines}

    def alarms(self, bounds: GapBounds) -> list[str]:
        """A message for every engine that crosses a bound."""
        return [
            f"{name}: {', '.join(crossed)}"
            for name, stats in self.engines.items()
            if (crossed := list(stats.crossed(bounds)))
        ]


def mismatch_stats(differences: Tensor) -> MismatchStats:
    """Statistics of differences, shape (N,)."""
    if not len(differences):
        return MismatchStats()
    size = differences.abs()
    weights = differences.clamp(-20.0, 20.0).exp()
    return MismatchStats(
        mean=float(size.mean()),
        p99=float(size.kthvalue(max(1, int(0.99 * len(size)))).values),
        max=float(size.max()),
        ess=float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
        tokens=len(size),
    )


def measure(
    differences: Sequence[Tensor],
    on_policy: Sequence[Tensor],
    engines: Sequence[Sequence[str]],
    older: Sequence[tuple[Tensor, Sequence[str]]] = (),
) -> LogprobMismatch:
    """The log-prob mismatch of a step.

    Args:
        differences: (N,) each: learner minus engine log-probs of sampled tokens.
        on_policy: (N,) bool each: whether the newest policy sampled the token.
        engines: N names each: the engine that sampled the token.
        older: (M,) differences to the older policy that sampled the tokens, and M names, each.
    """
    every = torch.cat([torch.empty(0), *differences])
    is_newest = torch.cat([torch.empty(0, dtype=torch.bool), *on_policy])
    flags = cast("list[bool]", is_newest.tolist())  # pyright: ignore[reportUnknownMemberType] - untyped in torch
    names = [name for name, on in zip(chain.from_iterable(engines), flags, strict=True) if on]
    names += [name for _, part in older for name in part]
    own_gap = torch.cat([every[is_newest], *(part for part, _ in older)])
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    by = torch.tensor([numbers[name] for name in names], dtype=torch.long)
    return LogprobMismatch(
        all=mismatch_stats(every),
        own=mismatch_stats(own_gap),
        engines={name: mismatch_stats(own_gap[by == number]) for name, number in numbers.items()},
    )
