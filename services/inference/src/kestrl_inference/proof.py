"""Whether an engine serves a version: its probe log-probs against the learner's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kestrl.errors import Boundary, Failure
from kestrl.storage import Probe
from kestrl.storage.adapters import largest_gap

CLEARLY = 2.0
"""How many times nearer to the base, or to another version, an answer must be to count as theirs. Where they differ by less than the
engine's rounding (the first steps of a warm-up, bfloat16) an answer is near both, and which is nearer is then chance: no ground to refuse."""
BASE = ""
"""The base model's name among those of versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison says."""

    gap: float
    """Largest |engine - learner| over the probe."""
    failure: Failure | None


def judge(
    name: str,
    engine: str,
    probe: Probe,
    scores: Sequence[float],
    bound: float,
    others: Mapping[str, Probe] = MappingProxyType({}),
) -> Verdict:
    """Compares.

    Args:
        name: The version.
        engine: The engine, for the message.
        probe: The learner's numbers.
        scores: The engine's.
        bound: Largest accepted difference.
        others: Probes of the other versions that the engine holds, by name. One step changes log-probs by little, so that an answer of
            the version before may lie within the bound.
    """
    gap, base_gap = largest_gap(scores, probe.logprobs), largest_gap(scores, probe.base_logprobs)
    alike = {BASE: base_gap} | {
        other: largest_gap(scores, theirs.logprobs)
        for other, theirs in others.items()
        if theirs.token_ids == probe.token_ids
    }
    nearest = min(alike, key=lambda other: alike[other])
    mistaken = CLEARLY * alike[nearest] < gap
    if gap <= bound and not mistaken:
        return Verdict(gap=gap, failure=None)
    if not mistaken or alike[nearest] > bound:
        code, what = "probe_failed", "it answers neither as the adapter nor as the base model"
    elif nearest == BASE:
        code, what = "adapter_not_applied", "it answers as the base model does"
    else:
        code, what = "other_version", f"it answers as {nearest} does"
    message = f"{engine} does not serve {name}: {what} (probe gap {gap:.3g}, bound {bound:.3g})"
    return Verdict(gap=gap, failure=Failure(boundary=Boundary.ENGINE, code=code, message=message, component=engine))
