"""Statistics of the log-prob mismatch between learner and engines: of a step, and of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kestrl._shared.plan.settings.learner import GapBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Statistics of log-prob differences, learner minus engine, in nats per sampled token."""

    mean: float = 0.0
    """Mean absolute difference; `p99` and `max` are of absolute differences too."""
    p99: float = 0.0
    max: float = 0.0
    ess: float = 1.0
    """Effective sample size of the importance weights as a share of the tokens; 1 if all log-probs agree."""
    tokens: int = 0

    def crossed(self, bounds: GapBounds) -> Iterator[str]:
        """A message for every bound that is crossed; NaN crosses every bound."""
        for name in ("mean", "p99", "max"):
            value, bound = getattr(self, name), getattr(bounds, name)
            if not value <= bound:
                yield f"{name} {value:.3g} above {bound:.3g}"
        if not self.ess >= bounds.ess:
            yield f"effective sample size {self.ess:.3g} below {bounds.ess:.3g}"
