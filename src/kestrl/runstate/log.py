"""The log of a run's events: the closed list, their numbers, and the reducer. Pure.

Events are numbered in the order in which they happened, and the reducer ignores a number that the state has already, so
that reading events twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from kestrl.runstate import events
from kestrl.runstate.part import Part
from kestrl.runstate.state import RunState

Event = Annotated[
    events.ProcessStarted
    | events.StepsPlanned
    | events.CheckpointFound
    | events.HistoryRestored
    | events.PhaseEntered
    | events.ActivityNoted
    | events.VersionPublished
    | events.VersionVerified
    | events.EnginesObserved
    | events.EnginesWorked
    | events.GatheringBegan
    | events.GroupScored
    | events.FailureCounted
    | events.RowSkipped
    | events.GroupOutdated
    | events.TokensMasked
    | events.ToolsWarned
    | events.SandboxesReported
    | events.MismatchMeasured
    | events.StepFinished
    | events.LearningObserved
    | events.Evaluated
    | events.Compared
    | events.CheckpointConfirmed
    | events.StorageRefused
    | events.StorageAwaited
    | events.ToolsAwaited
    | events.ObservationsEnded,
    Field(discriminator="kind"),
]
"""Every event that there is."""


def _known(event: Any) -> Any:
    """The JSON form of an event; None for a kind that a later version has added."""
    if not isinstance(event, dict):
        return event
    content = cast("dict[str, Any]", event)
    return content if content.get("kind") in KINDS else None


class Entry(Part):
    """An event in a run's log."""

    number: int
    """Place in the order of the run's events, from 1."""
    at: float
    """Seconds since 1970."""
    event: Annotated[Event | None, BeforeValidator(_known)]
    """None if its kind is unknown to this version."""


KINDS = frozenset(str(kind.model_fields["kind"].default) for kind in events.RunEvent.__subclasses__())
"""Words for the kinds of events in JSON."""


def reduced(state: RunState, entries: Iterable[Entry]) -> RunState:
    """The state after more events; one whose number the state has already changes nothing."""
    for entry in entries:
        if entry.number > state.number:
            after = state if entry.event is None else entry.event.after(state)
            state = after.but(number=entry.number)
    return state
