"""What the page of a step shows: its groups as strips of rewards, or the episodes that a saved filter selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kestrl._app.episodes.labels import read_labels
from kestrl._app.episodes.reading import Batch
from kestrl._app.page.charts import ChartMark, strip
from kestrl._app.page.filters import FILTERS, filter_of
from kestrl._app.page.steps import step_rows
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import ObjectEpisodeStore

SHOWN_GROUPS = 100
"""Groups of a page."""
SHOWN_ROWS = 100
"""Episodes of a page of a filter."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStrip:
    """A group on the page of its step."""

    group: str
    scenario: str
    outcome: str
    reason: str
    rows: Sequence[Row]
    """Its episodes; none if the group failed as a whole."""
    failure: str
    """`boundary/code` of the group as a whole; empty otherwise."""
    spread: float
    """Largest minus smallest reward."""
    failed: int
    dots: Sequence[ChartMark]


def step_facts(store: ObjectStore, batch: Batch, begin: int) -> dict[str, Any] | None:
    """The groups of a step, those with the largest spread first, then those with failures; None if there is no such
    step.
    """
    rows = _labelled_rows(store, batch, tokens=False)
    if rows is None:
        return None
    groups = strips(rows)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "low": min(rewards, default=None),
        "high": max(rewards, default=None),
        "groups": groups[begin : begin + SHOWN_GROUPS],
        "total": len(groups),
        "begin": begin,
        "further": begin + SHOWN_GROUPS if len(groups) > begin + SHOWN_GROUPS else None,
        "episodes": sum(row["episode"] is not None for row in rows),
        "rows": len(rows),
        "filters": [
            (saved, None if saved.tokens else sum(map(saved.matches, rows)))
            for saved in FILTERS.values()
            if saved.tokens or any(map(saved.matches, rows))
        ],
    }


def filtered_facts(store: ObjectStore, batch: Batch, name: str, above: str | None, begin: int) -> dict[str, Any] | None:
    """The rows of a step that a filter selects, from a place on; None if there is no such step, filter or place."""
    saved = filter_of(name, above)
    rows = None if saved is None else _labelled_rows(store, batch, tokens=saved.tokens)
    if saved is None or rows is None:
        return None
    selected = [row for row in rows if saved.matches(row)]
    if begin and begin >= len(selected):
        return None
    return {
        "filter": saved,
        "above": above if saved.bounded else None,
        "selected": selected[begin : begin + SHOWN_ROWS],
        "count": len(selected),
        "rows": len(rows),
        "begin": begin,
        "further": begin + SHOWN_ROWS if len(selected) > begin + SHOWN_ROWS else None,
    }


def _labelled_rows(store: ObjectStore, batch: Batch, *, tokens: bool) -> Sequence[Row] | None:
    if batch.step not in ObjectEpisodeStore(store).steps(batch.purpose):
        return None
    labels = read_labels(store)
    rows = step_rows(store, batch, tokens=tokens)
    return [{**row, "label": labels[row["episode"]].label if row["episode"] in labels else None} for row in rows]


def strips(rows: Sequence[Row]) -> Sequence[GroupStrip]:
    """The groups of rows in the order of the page."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    span = (min(rewards, default=0.0), max(rewards, default=0.0))
    groups = [_strip(list(group_rows), span) for _, group_rows in groupby(rows, key=lambda row: row["group_index"])]
    return sorted(groups, key=lambda group: (-group.spread, -group.failed, group.group))


def _strip(rows: Sequence[Row], span: tuple[float, float]) -> GroupStrip:
    first, episodes = rows[0], [row for row in rows if row["episode"] is not None]
    rewards = [row["reward"] for row in episodes if row["reward"] is not None]
    failed_as_group = not episodes and first["failure_boundary"] is not None
    return GroupStrip(
        group=first["group"],
        scenario=first["scenario"],
        outcome=first["outcome"],
        reason=first["reason"],
        rows=episodes,
        failure=f"{first['failure_boundary']}/{first['failure_code']}" if failed_as_group else "",
        spread=max(rewards, default=0.0) - min(rewards, default=0.0),
        failed=sum(row["failure_boundary"] is not None for row in rows),
        dots=strip([row["reward"] for row in episodes], *span),
    )
