"""The ruler as a component of the reward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kestrl._shared.plan.settings.judge import RulerEntry
from kestrl.episode import UNSCORED, Json
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.ruler.asking import Asker, BuildPrompt, JudgeCounts, Opinion
from kestrl_judge.ruler.client import NoScores, NoScoresReason
from kestrl_judge.ruler.journal import Journal
from kestrl_judge.ruler.prompt import build
from kestrl_judge.ruler.trajectories import Comparison, compare
from kestrl_judge.scoring import JudgeStopped, ScoredGroup, ScoringGate

log = logging.getLogger(__name__)
NAME = "ruler"
NEUTRAL = 0.5
"""Score of episodes that have nothing to be compared with. Equal scores give no advantage, so none is learned from."""


class RulerScorer:
    """Scorer by judge models.

    Args:
        ruler: Its settings.
        salt: Makes ids and orders unpredictable; equal for all processes of a run, so that answers are known again.
        state_dir: Folder of the journal; None keeps it in memory.
        counts: Counts that it shares with other judges.
    """

    name = NAME

    def __init__(
        self, ruler: RulerEntry, *, salt: str, state_dir: str | None = None, counts: JudgeCounts | None = None
    ) -> None:
        self.weight = ruler.weight
        self.gate = None if ruler.gate is None else ScoringGate(ruler.gate, ruler.gate_minimum)
        self.counts = counts or JudgeCounts()
        self._ruler, self._salt = ruler, salt
        self._journal = Journal(state_dir)
        self._asker: Asker | None = None

    async def open(self) -> None:
        """Reads the journal. No request is sent: each is paid for."""
        self._journal.open()
        self._asker = Asker(self._ruler, self._journal, self.counts)

    async def close(self) -> None:
        if self._asker is not None:
            await self._asker.close()
        self._journal.close()

    async def score(
        self,
        group: EncodedGroup,
        *,
        max_turns: int,  # noqa: ARG002 - the interface of scorers
    ) -> ScoredGroup:
        comparison = compare(group.decoded, show_reasoning=self._ruler.show_reasoning)
        if len(comparison.trajectories) == 1:
            return self._skipped(group)
        calls: list[dict[str, Any]] = []
        try:
            opinions = await self._opinions(comparison, calls)
        except NoScores as error:
            self.counts.unscored[error.reason] += 1
            failure = unscored(error)
            return ScoredGroup({episode.id: failure for episode in group.episodes}, details={"calls": calls})
        except JudgeStopped as error:
            return ScoredGroup({episode.id: error.failure() for episode in group.episodes})
        return _scored(comparison, opinions, calls)

    def _skipped(self, group: EncodedGroup) -> ScoredGroup:
        self.counts.skipped += 1
        reason = "alone" if len(group.episodes) == 1 else "all episodes are equal"
        score = Score(value=NEUTRAL, metrics={"ruler_skipped": 1.0})
        return ScoredGroup({episode.id: score for episode in group.episodes}, details={"skipped": reason})

    async def _opinions(self, comparison: Comparison, calls: list[dict[str, Any]]) -> list[Opinion]:
        """The opinions on every order, as far as there are any.

        Raises:
            NoScores: There is none.
            JudgeStopped: The scorer was closed.
        """
        assert self._asker is not None, "open the scorer first"
        records: list[list[dict[str, Any]]] = [[] for _ in range(self._ruler.permutations)]
        try:
            async with asyncio.timeout(self._ruler.seconds):
                outcomes = await asyncio.gather(
                    *(
                        self._asker.opinion(prompts(comparison, self._ruler, self._salt, number), record)
                        for number, record in enumerate(records)
                    ),
                    return_exceptions=True,
                )
        except TimeoutError as error:
            raise self._asker.late(f"no scores within {self._ruler.seconds:g} s") from error
        finally:
            calls.extend(entry for record in records for entry in record)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if not isinstance(failure, NoScores):
                raise failure
        opinions = [outcome for outcome in outcomes if isinstance(outcome, Opinion)]
        if not opinions:
            raise failures[0]
        return opinions


def prompts(comparison: Comparison, ruler: RulerEntry, salt: str, permutation: int) -> BuildPrompt:
    """The prompts of a comparison in one order."""
    return lambda tokens: build(comparison, rubric=ruler.rubric, salt=salt, permutation=permutation, tokens=tokens)


def unscored(error: NoScores, name: str = NAME) -> Failure:
    """The failure of the episodes of a group without scores."""
    if error.reason is NoScoresReason.UNAUTHORIZED:
        message = f"{name}: the judge model accepts its key no more; put the new one into the Secret: {error}"
        return Failure(boundary=Boundary.JUDGE, code="judge_unauthorized", message=message, retryable=True)
    return Failure(boundary=Boundary.JUDGE, code=UNSCORED, message=f"{name}: not scored ({error.reason}): {error}")


def _scored(comparison: Comparison, opinions: Sequence[Opinion], calls: Sequence[Mapping[str, Json]]) -> ScoredGroup:
    """The mean of the opinions for each episode."""
    grades: dict[str, list[tuple[float, str]]] = {}
    for opinion in opinions:
        for name, grade in opinion.grades.items():
            for episode_id in opinion.prompt.episodes[name]:
                grades.setdefault(episode_id, []).append((grade.score, grade.explanation))
    ids = [episode_id for trajectory in comparison.trajectories for episode_id in trajectory.episode_ids]
    return ScoredGroup(
        {
            episode_id: Score(value=fmean(score for score, _ in grades[episode_id]), metrics={"ruler_skipped": 0.0})
            for episode_id in ids
        },
        episodes={
            episode_id: {
                "scores": [score for score, _ in grades[episode_id]],
                "explanation": grades[episode_id][0][1],
                "judges": [opinion.model for opinion in opinions],
            }
            for episode_id in ids
        },
        details={"calls": list(calls)},
    )
