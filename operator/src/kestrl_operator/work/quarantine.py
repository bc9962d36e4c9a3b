"""The quarantine of a spec that killed an operator: its job is left as it is until the spec changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrl_operator.status.conditions import QUARANTINED, Type
from kestrl_operator.work.work_record import Handled


def is_quarantined(raw: Mapping[str, Any], killed_by: Handled | None) -> bool:
    """Whether this spec killed an operator: this one, according to its record, or another, according to the job's
    status.

    Args:
        raw: The job object.
        killed_by: What the previous process was working on when it was killed.
    """
    uid, generation = raw["metadata"]["uid"], raw["metadata"].get("generation", 0)
    if killed_by is not None and (killed_by.uid, killed_by.generation) == (uid, generation):
        return True
    return any(item.get("observedGeneration") == generation for item in _reported(raw))


def message(raw: Mapping[str, Any]) -> str:
    """The message of condition Ready; empty if it is reported already."""
    generation = raw["metadata"].get("generation", 0)
    text = (
        f"an operator was killed while it worked on generation {generation} of the spec; the job is left as it is "
        "until a field of its spec changes: see the operator's memory limit and log, and report the spec if it is "
        "a reasonable one"
    )
    return "" if any(item["message"] == text for item in _reported(raw)) else text


def _reported(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for item in raw.get("status", {}).get("conditions", ()):
        if item["type"] == Type.READY and item["reason"] == QUARANTINED:
            yield item
