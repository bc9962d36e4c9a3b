"""The rows of an episode: the tokens that the engine saw and sampled. Rows are only extended at the end."""

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


class Recorder:
    """Builds rows from engine calls."""

    def __init__(self) -> None:
        self._rows: list[_OpenRow] = []

    @property
    def forks(self) -> int:
        """Number of rows beyond the first."""
        return max(0, len(self._rows) - 1)

    def record(self, prompt: Sequence[int], completion: Completion) -> Span:
        """Adds an engine call. A prompt that begins with the last row extends it; any other begins a new row."""
        last = self._rows[-1] if self._rows else None
        if last is None or list(prompt[: len(last.ids)]) != last.ids:
            last = _OpenRow()
            self._rows.append(last)
        last.append(prompt[len(last.ids) :], None)
        start = len(last.ids)
        last.append(completion.token_ids, completion.logprobs)
        last.policies.append(completion.policy)
        return Span(row=len(self._rows) - 1, start=start, end=len(last.ids))

    def set_training_mask(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        """Restricts training to this sequence: a prefix of a row, or a row continued by tokens of mask 0.

        Other rows, and sampled tokens that it masks, are kept with mask 0.

        Raises:
            UserCodeError: It is not such a sequence, or its mask is 1 on a token that was not sampled there.
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
                "the loop returned tokens that no engine call saw or sampled", code="tokens_not_sampled"
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
        """The completed rows."""
        return tuple(row.close() for row in self._rows)
