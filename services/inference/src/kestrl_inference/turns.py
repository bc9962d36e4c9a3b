"""Turns of an engine and the learner on one device: states, events, commands. Pure.

The engine gives the device up when the learner asks for it, and takes it back when the learner returns it or lets its
lease run out. An engine that cannot is ended, and its supervisor starts it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class TurnState(StrEnum):
    """Where an engine is in the cycle."""

    GONE = "gone"
    """It does not answer: not started yet, or ended."""
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    """It finishes its running requests, takes no further ones, and then gives its memory up."""
    ASLEEP = "asleep"
    """The device is the learner's."""
    WAKING = "waking"
    PROVING = "proving"
    """It has its memory again, and its versions and the base model are verified."""
    ENDING = "ending"
    """Its server is being ended, since what its memory holds is not known."""


class TurnEvent(StrEnum):
    """What happens to an engine."""

    ASKED = "asked"
    """The learner asks for the device."""
    RETURNED = "returned"
    """The learner gives the device back, or its lease has run out."""
    SLEPT = "slept"
    STAYED = "stayed"
    """It has not fallen asleep and can go on: its requests did not end in time, or it refuses to sleep."""
    WOKE = "woke"
    PROVED = "proved"
    FAILED = "failed"
    """What it was ordered to do has failed, and what its memory holds is not known."""
    LOST = "lost"
    """It stopped answering or was started anew."""
    BACK = "back"
    """It answers and is awake."""
    RESTING = "resting"
    """It answers and is asleep: an earlier agent put it to sleep."""


class TurnCommand(StrEnum):
    """What the agent does next; each of the first three ends with an event."""

    SLEEP = "sleep"
    WAKE = "wake"
    PROVE = "prove"
    OPEN = "open"
    """Lets requests of others in again."""
    END = "end"
    """Ends the engine's server."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of the cycle."""

    state: TurnState = TurnState.GONE
    wanted: bool = False
    """Whether the learner has asked for the device and not returned it."""

    @property
    def shut(self) -> bool:
        """Whether the engine answers and takes no requests but the agent's proofs."""
        return self.state not in {TurnState.GONE, TurnState.AWAKE}


def after(turn: Turn, event: TurnEvent) -> tuple[Turn, TurnCommand | None]:
    """The turn after an event, and what to do. An event that says nothing new in a state changes nothing."""
    is_wanted = {TurnEvent.ASKED: True, TurnEvent.RESTING: True, TurnEvent.RETURNED: False}.get(event, turn.wanted)
    turn = replace(turn, wanted=is_wanted)
    match turn.state, event:
        case _, TurnEvent.LOST:
            return replace(turn, state=TurnState.GONE), None
        case TurnState.GONE, TurnEvent.RESTING:
            return replace(turn, state=TurnState.ASLEEP), None
        case (TurnState.AWAKE, TurnEvent.ASKED) | (TurnState.GONE, TurnEvent.BACK):
            return _with_memory(turn)
        case TurnState.PROVING, TurnEvent.PROVED:
            return _with_memory(turn)
        case TurnState.FALLING_ASLEEP, TurnEvent.SLEPT:
            return _without_memory(turn)
        case TurnState.ASLEEP, TurnEvent.RETURNED:
            return _without_memory(turn)
        case TurnState.FALLING_ASLEEP, TurnEvent.STAYED:
            return Turn(TurnState.AWAKE), TurnCommand.OPEN
        case TurnState.WAKING, TurnEvent.WOKE:
            return replace(turn, state=TurnState.PROVING), TurnCommand.PROVE
        case ((TurnState.FALLING_ASLEEP | TurnState.WAKING | TurnState.PROVING), TurnEvent.FAILED):
            return replace(turn, state=TurnState.ENDING), TurnCommand.END
        case _:
            return turn, None


def _with_memory(turn: Turn) -> tuple[Turn, TurnCommand]:
    """An engine that has its memory and may take requests, unless the learner waits."""
    if turn.wanted:
        return replace(turn, state=TurnState.FALLING_ASLEEP), TurnCommand.SLEEP
    return replace(turn, state=TurnState.AWAKE), TurnCommand.OPEN


def _without_memory(turn: Turn) -> tuple[Turn, TurnCommand | None]:
    """An engine that sleeps, as long as the learner has the device."""
    if turn.wanted:
        return replace(turn, state=TurnState.ASLEEP), None
    return replace(turn, state=TurnState.WAKING), TurnCommand.WAKE
