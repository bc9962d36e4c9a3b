"""Saved filters of a step's episodes. Typed: a page sends a filter's name and a number, never a condition. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kestrl.episode import StopReason
from kestrl.errors import Boundary
from kestrl.storage.episodes import TRAINED_OUTCOMES, GroupOutcome

Row = Mapping[str, Any]
GAP = "gap"
GAP_BOUND = 0.05
"""Log-prob gap in nats a token above which the filter selects, unless the page sends another."""
DISAGREED = "judge-disagreed"
DISAGREED_BOUND = 0.25
"""Distance of a ruler's largest to its smallest score of an episode, likewise."""
LIMITS = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_TURNS, StopReason.AGENT_LIMIT})
"""Reasons of episodes that a limit ended."""
USED = TRAINED_OUTCOMES | {GroupOutcome.EVALUATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFilter:
    """A filter by name."""

    name: str
    title: str
    matches: Callable[[Row], bool]
    tokens: bool = False
    """Whether it needs the tokens of the step."""
    bounded: str = ""
    """What it compares with a bound that a page may send; empty if it compares nothing."""


def _failed_at(boundary: Boundary) -> SavedFilter:
    return SavedFilter(
        name=f"failed-{boundary}",
        title=f"failed at {boundary.replace('_', ' ')}",
        matches=lambda row: row["failure_boundary"] == boundary,
    )


def gap_above(bound: float) -> SavedFilter:
    """The filter of episodes with a log-prob gap above a bound."""
    return SavedFilter(name=GAP, title=f"gap above {bound:g}", matches=_above("gap", bound), tokens=True, bounded="gap")


def disagreed_above(bound: float) -> SavedFilter:
    """The filter of episodes whose scores by a ruler differ by more than a bound."""
    title = "judge disagreed" if bound == DISAGREED_BOUND else f"judge disagreed by more than {bound:g}"
    return SavedFilter(name=DISAGREED, title=title, matches=_above("disagreement", bound), bounded="distance of scores")


def _above(column: str, bound: float) -> Callable[[Row], bool]:
    return lambda row: row[column] is not None and row[column] > bound


_SAVED = (
    SavedFilter(name="failed", title="failed", matches=lambda row: row["failure_boundary"] is not None),
    *(_failed_at(boundary) for boundary in Boundary),
    SavedFilter(
        name="no-tool-call",
        title="no tool call",
        matches=lambda row: row["episode"] is not None and row["num_tool_calls"] == 0,
    ),
    SavedFilter(name="truncated", title="ended by a limit", matches=lambda row: row["stop"] in LIMITS),
    SavedFilter(name="not-trained", title="not trained on", matches=lambda row: row["outcome"] not in USED),
    SavedFilter(name="labelled-yes", title="labelled yes", matches=lambda row: row["label"] == "yes"),
    SavedFilter(name="labelled-no", title="labelled no", matches=lambda row: row["label"] == "no"),
    disagreed_above(DISAGREED_BOUND),
    gap_above(GAP_BOUND),
)
FILTERS: Mapping[str, SavedFilter] = MappingProxyType({saved.name: saved for saved in _SAVED})


_BOUNDED: Mapping[str, Callable[[float], SavedFilter]] = MappingProxyType({GAP: gap_above, DISAGREED: disagreed_above})


def filter_of(name: str, above: str | None) -> SavedFilter | None:
    """The filter that a page names; None if there is none of this name, or its bound is not a finite number."""
    if above is None or name not in _BOUNDED:
        return FILTERS.get(name)
    try:
        bound = float(above)
    except ValueError:
        return None
    return _BOUNDED[name](bound) if math.isfinite(bound) else None
