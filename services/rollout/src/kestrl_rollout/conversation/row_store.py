"""The rows of an episode: the tokens that the engine saw and sampled. Rows are only extended at the end.

A call extends the longest row that its prompt begins with, token by token, and holds it until it ends; any other call
begins a new row. What a new row has in common with others is context there: a sampled token is trained in one row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kestrl.agents import Completion
from kestrl.episode import Row
from kestrl.errors import UserCodeError


@dataclass(slots=True, eq=False)
class _OpenRow:
    ids: list[int] = field(default_factory=list[int])
    mask: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list[float])
    policies: list[str] = field(default_factory=list[str])
    calls: list[int] = field(default_factory=list[int])
    """Numbers of the calls that sampled it."""
    opening: int = 0
    """Length of its first prompt."""
    lane: int = 0
    held: bool = False

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Adds sampled tokens with their log-probs, or without log-probs context tokens."""
        self.ids += ids
        self.mask += (b"\0" if logprobs is None else b"\1") * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def close(self) -> Row:
        return Row(
            token_ids=array("i", self.ids),
            mask=bytes(self.mask),
            logprobs=array("f", self.logprobs),
            policies=tuple(self.policies),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Position of sampled tokens."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A call's place in the store, from its admission to its end."""

    call: int
    prompt: Sequence[int]
    row: _OpenRow | None
    """The row that it extends; None for a new one."""
    lane: int
    """Calls of a lane follow each other on the same engine; those that are in flight together have other lanes, unless
    their rows were of one lane before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What the choice of the main row needs to know of a row."""

    opening: Sequence[int]
    """Its first prompt."""
    calls: Sequence[int]
    """Numbers of the calls that sampled it, in the order of their arrival."""


class RowStore:
    """Builds rows from engine calls, several at a time."""

    def __init__(self) -> None:
        self._rows: list[_OpenRow] = []
        self._in_flight: set[Place] = set()

    @property
    def forks(self) -> int:
        """Number of rows beyond the first."""
        return max(0, len(self._rows) - 1)

    @property
    def facts(self) -> list[RowFacts]:
        return [RowFacts(opening=row.ids[: row.opening], calls=row.calls) for row in self._rows]

    def beginning(self, row: int, end: int) -> list[int]:
        """The first tokens of a row."""
        return self._rows[row].ids[:end]

    def place(self, call: int, prompt: Sequence[int]) -> Place:
        """Finds the row that a prompt extends, and holds it.

        Args:
            call: Number of the call.
            prompt: Ids of its prompt.
        """
        row = max(
            (row for row in self._rows if not row.held and list(prompt[: len(row.ids)]) == row.ids),
            key=lambda row: len(row.ids),
            default=None,
        )
        lane = row.lane if row is not None else self._free_lane()
        place = Place(call, prompt, row, lane)
        if row is not None:
            row.held = True
        self._in_flight.add(place)
        return place

    def _free_lane(self) -> int:
        busy_lanes = {place.lane for place in self._in_flight}
        return next(lane for lane in range(len(busy_lanes) + 1) if lane not in busy_lanes)

    def record(self, place: Place, completion: Completion) -> Span:
        """Adds what a call sampled, and ends it."""
        self.release(place)
        row = place.row
        if row is None:
            row = _OpenRow(opening=len(place.prompt), lane=place.lane)
            self._rows.append(row)
        row.append(place.prompt[len(row.ids) :], None)
        start = len(row.ids)
        row.append(completion.token_ids, completion.logprobs)
        row.policies.append(completion.policy)
        row.calls.append(place.call)
        return Span(row=self._rows.index(row), start=start, end=len(row.ids))

    def release(self, place: Place) -> None:
        """Ends a call; one that sampled nothing leaves its row as it was. No effect on one that has ended."""
        if place not in self._in_flight:
            return
        self._in_flight.remove(place)
        if place.row is not None:
            place.row.held = False

    def locate(self, token_ids: Sequence[int]) -> int:
        """The newest row that begins with a sequence, or that a sequence begins with.

        Raises:
            UserCodeError: There is none (code `tokens_not_sampled`).
        """
        ids = list(token_ids)
        for index in range(len(self._rows) - 1, -1, -1):
            row = self._rows[index].ids
            shared = min(len(ids), len(row))
            if ids[:shared] == row[:shared]:
                return index
        raise UserCodeError("the loop returned tokens that no engine call saw or sampled", code="tokens_not_sampled")

    def set_training_mask(self, token_ids: Sequence[int], mask: Sequence[int]) -> int:
        """Restricts training to this sequence: a prefix of a row, or a row continued by tokens of mask 0.

        Other rows, and sampled tokens that it masks, are kept with mask 0.

        Returns:
            The row.

        Raises:
            UserCodeError: It is not such a sequence, or its mask is 1 on a token that was not sampled there.
        """
        if len(token_ids) != len(mask):
            raise UserCodeError(
                f"the loop returned {len(token_ids)} tokens with a mask of {len(mask)}", code="mask_length"
            )
        index = self.locate(token_ids)
        row = self._rows[index]
        shared = min(len(token_ids), len(row.ids))
        for position, bit in enumerate(mask):
            if bit and (position >= shared or not row.mask[position]):
                raise UserCodeError(
                    f"the loop's mask is 1 on token {position}, which the engine did not sample",
                    code="mask_not_sampled",
                )
        trained = bytearray(1 if bit else 0 for bit in mask[:shared])
        trained += bytes(len(row.ids) - shared)
        for stored in self._rows:
            stored.mask = trained if stored is row else bytearray(len(stored.ids))
            stored.logprobs = [value if on else 0.0 for value, on in zip(stored.logprobs, stored.mask, strict=True)]
        return index

    def close(self) -> tuple[Row, ...]:
        """The completed rows."""
        return tuple(row.close() for row in self._rows)
