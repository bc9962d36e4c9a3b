"""Verifies that an engine serves a version, by comparing its probe log-probs with the learner's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kestrl.errors import Boundary, Failure
from kestrl.storage import Probe
from kestrl.storage.adapters import largest_gap

CLEARLY = 2.0
"""Factor by which an answer must be closer to the base model, or to another version, to be attributed to it. If these
differ by less than the engine's rounding (first steps of a warm-up, bfloat16), an answer is close to both, which is no
reason for a refusal."""
BASE = ""
"""Name of the base model among versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeComparison:
    """Result of the comparison."""

    gap: float
    """Largest |engine - learner| over the probe."""
    failure: Failure | None


def compare(
    name: str,
    engine: str,
    probe: Probe,
    scores: Sequence[float],
    bound: float,
    others: Mapping[str, Probe] = MappingProxyType({}),
) -> ProbeComparison:
    """Compares the probe log-probs of an engine with those of the learner.

    Args:
        name: Name of the version.
        engine: Name of the engine, for messages.
        probe: Log-probs of the learner.
        scores: Log-probs of the engine.
        bound: Largest accepted difference.
        others: Probes of the other versions in the engine, by name. One step changes log-probs only a little, so the
            previous version may be within the bound.
    """
    gap, base_gap = largest_gap(scores, probe.logprobs), largest_gap(scores, probe.base_logprobs)
    alike = {BASE: base_gap} | {
        other: largest_gap(scores, theirs.logprobs)
        for other, theirs in others.items()
        if theirs.token_ids == probe.token_ids
    }
    likeness = min(alike, key=lambda other: alike[other])
    mistaken = CLEARLY * alike[likeness] < gap
    if gap <= bound and not mistaken:
        return ProbeComparison(gap=gap, failure=None)
    if not mistaken or alike[likeness] > bound:
        code, finding = "probe_failed", "it answers neither as the adapter nor as the base model"
    elif likeness == BASE:
        code, finding = "adapter_not_applied", "it answers as the base model does"
    else:
        code, finding = "other_version", f"it answers as {likeness} does"
    message = f"{engine} does not serve {name}: {finding} (probe gap {gap:.3g}, bound {bound:.3g})"
    return ProbeComparison(
        gap=gap, failure=Failure(boundary=Boundary.ENGINE, code=code, message=message, component=engine)
    )
