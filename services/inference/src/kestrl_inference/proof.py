"""Whether an engine serves a version: its probe log-probs against the learner's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.errors import Boundary, Failure
from kestrl.storage import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison says."""

    gap: float
    """Largest |engine - learner| over the probe."""
    failure: Failure | None


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def judge(name: str, engine: str, probe: Probe, scores: Sequence[float], bound: float) -> Verdict:
    """Compares.

    Args:
        name: The version.
        engine: The engine, for the message.
        probe: The learner's numbers.
        scores: The engine's.
        bound: Largest accepted difference.
    """
    gap = largest_gap(scores, probe.logprobs)
    if gap <= bound:
        effect = largest_gap(probe.logprobs, probe.base_logprobs)
        # Too weak an adapter cannot be told from the base model by this bound; nearer to the adapter than to the base can.
        if effect == 0.0 or gap <= largest_gap(scores, probe.base_logprobs):
            return Verdict(gap=gap, failure=None)
    if largest_gap(scores, probe.base_logprobs) <= min(bound, gap):
        code, what = "adapter_not_applied", "it answers as the base model does"
    else:
        code, what = "probe_failed", "it answers neither as the adapter nor as the base model"
    message = f"{engine} does not serve {name}: {what} (probe gap {gap:.3g}, bound {bound:.3g})"
    return Verdict(gap=gap, failure=Failure(boundary=Boundary.ENGINE, code=code, message=message, component=engine))
