"""Rewards: plain functions of a finished episode.

`def reward(attempt: Attempt) -> float | Sequence[float] | Score`, sync or async: a number for the episode, or one for
each of its turns. Further parameters are set by the manifest's `rewards[].config`. It runs in its own process with a
time limit. An exception becomes a typed failure: the episode then has no reward, rather than reward 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kestrl.episode import Episode, Scenario
from kestrl.errors import encodable

__all__ = ["Attempt", "Score"]


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer that a judge model is to compare with accepted ones."""

    question: str
    accepted: tuple[str, ...]
    answer: str

    def digest(self) -> str:
        """Identifies the claim."""
        text = json.dumps([self.question, self.accepted, self.answer])
        return hashlib.sha256(text.encode()).hexdigest()


class VerdictNeeded(BaseException):
    """A reward asked for a verdict that is not known yet; not an error, and not caught by `except Exception`."""

    def __init__(self, claim: Claim) -> None:
        super().__init__(claim)
        self.claim = claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Input of a reward: a finished episode and its scenario."""

    scenario: Scenario
    episode: Episode
    max_turns: int
    """The job's `agent.maxTurns`."""
    verdicts: Mapping[str, bool] | None = None
    """Verdicts of the correctness judge so far, by the digest of the claim; None if the reward has no such judge."""

    def judged_correct(self, *, question: str, accepted: Sequence[str], answer: str) -> bool | None:
        """Whether the job's judge model finds that an answer states what an accepted one does.

        None if the manifest names no judge (`rewards[].correctness`): the reward then decides itself. An answer without
        a letter or digit is wrong and is not sent to the judge. The reward is called again when the verdict is there,
        so that what precedes this call runs twice: keep it short and without side effects.

        Args:
            question: What was asked.
            accepted: Answers that are correct.
            answer: The agent's answer.
        """
        if self.verdicts is None:
            return None
        if not any(map(str.isalnum, answer)):
            return False
        claim = Claim(encodable(question), tuple(map(encodable, accepted)), encodable(answer))
        verdict = self.verdicts.get(claim.digest())
        if verdict is None:
            raise VerdictNeeded(claim)
        return verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with metrics."""

    value: float = 0.0
    """Finite reward of the episode as a whole; any other value is a judge failure."""
    turns: Sequence[float] = ()
    """Finite reward of each turn, in order, in addition to `value`; empty if turns are not scored."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics such as `answer_correct`, 0 or 1: averaged over episodes and reported, never trained on."""
    answer: str | None = None
    """The answer that the reward read, in a form that is equal for equal answers; empty if there is none. `kestrl eval`
    takes its majority votes over these. None if the reward reads no answer."""

    @property
    def total(self) -> float:
        """The reward of the episode, its turns included."""
        return self.value + math.fsum(self.turns)
