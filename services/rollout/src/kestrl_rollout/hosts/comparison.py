"""Whether an environment recorded the turns of the model that the worker sampled. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl.episode import Turn

MOST_TURNS = 2_000
"""Turns that are compared one with another; beyond, in their order."""


def difference(recorded: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> str | None:
    """The first difference between both records of an episode; None if there is none.

    Calls that are made at once may be recorded in another order.

    Args:
        recorded: Turns as the environment has them: `content`, names of `calls`, number of `tokens`.
        turns: Turns as the worker has them.
    """
    if len(recorded) != len(turns):
        return f"it has recorded {len(recorded)} turns of the model, and {len(turns)} were sampled"
    unmatched = list(turns)
    for number, record in enumerate(recorded):
        searched = unmatched if len(turns) <= MOST_TURNS else unmatched[:1]
        same = next((index for index, turn in enumerate(searched) if _is_same(record, turn)), None)
        if same is None:
            return f"turn {number} of its record is none that was sampled: {str(record.get('content'))[:200]!r}"
        del unmatched[same]
    return None


def _is_same(record: Mapping[str, Any], turn: Turn) -> bool:
    """Whether a record is that of a turn: as many tokens, and its text, of which reasoning and calls stand apart."""
    if record.get("tokens") not in (None, turn.end - turn.start):
        return False
    lines = [*str(record.get("content") or "").splitlines(), *map(str, record.get("calls") or ())]
    return all(line.strip() in turn.text for line in lines)
