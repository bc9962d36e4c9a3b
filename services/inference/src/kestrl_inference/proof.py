"""Whether an engine serves a version: its probe log-probs against the learner's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.errors import Boundary, Failure
from kestrl.storage import Probe

CLEARLY = 2.0
"""How many times nearer to the base than to the version an answer must be to count as the base's. An adapter whose effect is below
the engine's rounding (the first steps of a warm-up, bfloat16) is near both, and which is nearer is then chance: no ground to refuse."""


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
    gap, base_gap = largest_gap(scores, probe.logprobs), largest_gap(scores, probe.base_logprobs)
    like_base = CLEARLY * base_gap < gap
    if gap <= bound and not like_base:
        return Verdict(gap=gap, failure=None)
    if like_base and base_gap <= bound:
        code, what = "adapter_not_applied", "it answers as the base model does"
    else:
        code, what = "probe_failed", "it answers neither as the adapter nor as the base model"
    message = f"{engine} does not serve {name}: {what} (probe gap {gap:.3g}, bound {bound:.3g})"
    return Verdict(gap=gap, failure=Failure(boundary=Boundary.ENGINE, code=code, message=message, component=engine))
