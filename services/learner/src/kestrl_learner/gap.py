"""How far learner and engines are apart on what they say of the same tokens: the numbers, and when they mean an alarm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from kestrl.plan.settings import GapBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Learner minus engine, in nats a sampled token."""

    mean: float = 0.0
    """Of the sizes, as p99 and max are."""
    p99: float = 0.0
    max: float = 0.0
    ess: float = 1.0
    """Effective sample size of the importance weights, as a share of the tokens: 1 when both agree."""
    tokens: int = 0

    def crossed(self, bounds: GapBounds) -> Iterator[str]:
        """Every bound that does not hold; a number that is none holds no bound."""
        for name in ("mean", "p99", "max"):
            value, bound = getattr(self, name), getattr(bounds, name)
            if not value <= bound:
                yield f"{name} {value:.3g} above {bound:.3g}"
        if not self.ess >= bounds.ess:
            yield f"effective sample size {self.ess:.3g} below {bounds.ess:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A step's: of all tokens to the newest policy, and what should be 0 but for rounding, to the policy that sampled them."""

    all: Drift
    own: Drift
    """Of all tokens of the newest policy, and of a few of each older one."""
    engines: Mapping[str, Drift]
    """The same, by engine and policy."""

    def facts(self) -> dict[str, Any]:
        """For `metrics/`."""
        engines = {name: asdict(drift) for name, drift in self.engines.items()}
        return {**asdict(self.all), "own": asdict(self.own), "engines": engines}

    def alarms(self, bounds: GapBounds) -> list[str]:
        """What crosses its bound, by engine."""
        return [
            f"{name}: {', '.join(crossed)}"
            for name, drift in self.engines.items()
            if (crossed := list(drift.crossed(bounds)))
        ]


def drift_of(differences: Tensor) -> Drift:
    """The numbers of some tokens' differences, (N,)."""
    if not len(differences):
        return Drift()
    size = differences.abs()
    weights = differences.clamp(-20.0, 20.0).exp()
    return Drift(
        mean=float(size.mean()),
        p99=float(size.kthvalue(max(1, int(0.99 * len(size)))).values),
        max=float(size.max()),
        ess=float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
        tokens=len(size),
    )


def measure(
    differences: Sequence[Tensor],
    fresh: Sequence[Tensor],
    engines: Sequence[Sequence[str]],
    again: Sequence[tuple[Tensor, Sequence[str]]] = (),
) -> Gap:
    """The gap of a step from its parts.

    Args:
        differences: (N,) each: learner minus engine log-probs of sampled tokens.
        fresh: (N,) bool each: whether the newest policy sampled the token.
        engines: N names each: which engine did.
        again: (M,) differences to the older policy that sampled the tokens, and M names, each.
    """
    every = torch.cat([torch.empty(0), *differences])
    newest = torch.cat([torch.empty(0, dtype=torch.bool), *fresh])
    flags = cast("list[bool]", newest.tolist())  # pyright: ignore[reportUnknownMemberType] - untyped in torch
    names = [name for name, on in zip(chain.from_iterable(engines), flags, strict=True) if on]
    names += [name for _, part in again for name in part]
    own = torch.cat([every[newest], *(part for part, _ in again)])
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    by = torch.tensor([numbers[name] for name in names], dtype=torch.long)
    return Gap(
        all=drift_of(every),
        own=drift_of(own),
        engines={name: drift_of(own[by == number]) for name, number in numbers.items()},
    )


def merged(before: Mapping[str, float] | None, gap: Drift) -> dict[str, float]:
    """The gap over a run: the mean over all its tokens, and the worst of each step's other numbers."""
    if before is None:
        return asdict(gap)
    tokens = before["tokens"] + gap.tokens
    return {
        "tokens": tokens,
        "mean": (before["mean"] * before["tokens"] + gap.mean * gap.tokens) / max(1, tokens),
        "p99": max(before["p99"], gap.p99),
        "max": max(before["max"], gap.max),
        "ess": min(before["ess"], gap.ess),
    }
