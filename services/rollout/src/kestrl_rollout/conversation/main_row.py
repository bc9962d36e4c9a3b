"""The main row of an episode: the one that carries the task, for rules, judges and the final text. Pure.

Rows whose first prompts begin with that of an earlier row are one conversation, as those of a loop that writes history
anew; a title, a summary or a sub-agent has a prompt of its own. The main conversation is the first that has more than
one call, or if none has, the last; its main row is the one that was called last. A loop may name another row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kestrl_rollout.conversation.row_store import RowFacts


@dataclass(frozen=True, slots=True)
class MainRow:
    """The main row, and the rows of its conversation."""

    row: int
    conversation: Collection[int]


def main_row(rows: Sequence[RowFacts], *, linear: bool, loop_row: int | None = None) -> MainRow | None:
    """The main row of an episode; None if it has no row.

    Args:
        rows: The episode's rows.
        linear: Whether all rows are of one conversation.
        loop_row: The row that the loop named, if any.
    """
    if not rows:
        return None
    groups = [list(range(len(rows)))] if linear else conversations(rows)
    if loop_row is not None:
        return MainRow(loop_row, next(conversation for conversation in groups if loop_row in conversation))
    main = next(
        (conversation for conversation in groups if sum(len(rows[row].calls) for row in conversation) > 1), groups[-1]
    )
    return MainRow(max(main, key=lambda row: rows[row].calls[-1]), main)


def conversations(rows: Sequence[RowFacts]) -> list[list[int]]:
    """The rows of each conversation, in the order in which their first calls arrived."""
    gathered: list[list[int]] = []
    for row in sorted(range(len(rows)), key=lambda row: rows[row].calls[0]):
        opening = rows[row].opening
        for conversation in gathered:
            first = rows[conversation[0]].opening
            if opening[: len(first)] == first:
                conversation.append(row)
                break
        else:
            gathered.append([row])
    return gathered
