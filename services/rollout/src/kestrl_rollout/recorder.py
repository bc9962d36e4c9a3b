"""The rows of an episode: what the engine saw and sampled, token by token. They only ever grow at the end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kestrl.agents import Completion
from kestrl.episode import Row
from kestrl.errors import UserCodeError


@dataclass(slots=True)
class _OpenRow:
    ids: list[int] = field(default_factory=list[int])
    mask: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list[float])
    policies: list[str] = field(default_factory=list[str])

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Adds context, or with log-probabilities sampled tokens."""
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
    """Where sampled tokens lie."""

    row: int
    start: int
    end: int


class Recorder:
    """Grows rows from engine calls."""

    def __init__(self) -> None:
        self._rows: list[_OpenRow] = []

    @property
    def forks(self) -> int:
        """Rows beyond the first."""
        return max(0, len(self._rows) - 1)

    def record(self, prompt: Sequence[int], completion: Completion) -> Span:
        """Adds a call. A prompt that begins with the last row extends it; any other begins a new row."""
        last = self._rows[-1] if self._rows else None
        if last is None or list(prompt[: len(last.ids)]) != last.ids:
            last = _OpenRow()
            self._rows.append(last)
        last.append(prompt[len(last.ids) :], None)
        start = len(last.ids)
        last.append(completion.token_ids, completion.logprobs)
        last.policies.append(completion.policy)
        return Span(row=len(self._rows) - 1, start=start, end=len(last.ids))

    def keep(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        """Trains only on this sequence: it must begin a row or continue one with tokens of mask 0.

        Rows beside it, and sampled tokens that it masks, stay on record with mask 0.

        Raises:
            UserCodeError: It is no such sequence, or its mask is 1 on a token that was not sampled there.
        """
        if len(token_ids) != len(mask):
            raise UserCodeError(
                f"the loop returned {len(token_ids)} tokens with a mask of {len(mask)}", code="mask_length"
            )
        ids = list(token_ids)
        for index in range(len(self._rows) - 1, -1, -1):
            row = self._rows[index]
            shared = min(len(ids), len(row.ids))
            if ids[:shared] == row.ids[:shared]:
                break
        else:
            raise UserCodeError(
                "the loop returned tokens that no call of the engine saw or sampled", code="tokens_not_sampled"
            )
        for position, wanted in enumerate(mask):
            if wanted and (position >= shared or not row.mask[position]):
                raise UserCodeError(
                    f"the loop's mask is 1 on token {position}, which the engine did not sample",
                    code="mask_not_sampled",
                )
        kept = bytearray(1 if wanted else 0 for wanted in mask[:shared])
        kept += bytes(len(row.ids) - shared)
        for other in self._rows:
            other.mask = kept if other is row else bytearray(len(other.ids))
            other.logprobs = [value if on else 0.0 for value, on in zip(other.logprobs, other.mask, strict=True)]

    def close(self) -> tuple[Row, ...]:
        """The rows, finished."""
        return tuple(row.close() for row in self._rows)
