"""`python -m kestrl_judge.rejudge`: scores stored groups again with a ruler; run by `kestrl rejudge`.

Rules are not run again: their stored values gate the ruler and are summed with it as in the run.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kestrl._shared.checking import Rejudge, run_check
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.episode import UNSCORED, Group
from kestrl.episode.codec import group_from_proto
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.ruler.scorer import NAME, RulerScorer
from kestrl_judge.rules import component_names
from kestrl_judge.scoring import GroupJudgement, ScoredGroup, Scorer, ScoringGate, Verdict, judge


@dataclass(frozen=True, slots=True)
class Stored:
    """A component whose values are stored with the episodes."""

    name: str
    weight: float
    gate: ScoringGate | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, group: Group, *, max_turns: int) -> ScoredGroup:  # noqa: ARG002 - the interface of scorers
        verdicts: dict[str, Verdict] = {}
        for episode in group.episodes:
            value = episode.rewards.get(self.name)
            verdicts[episode.id] = self._missing(episode.id) if value is None else Score(value=value)
        return ScoredGroup(verdicts)

    def _missing(self, episode_id: str) -> Failure:
        return Failure(
            boundary=Boundary.JUDGE, code="reward_missing", message=f"{episode_id} has no stored value of {self.name}"
        )


def rejudge(settings: Rejudge) -> dict[str, Any]:
    """New scores of the groups of a batch, as JSON."""
    batch = common.GroupBatch.FromString(Path(settings.batch).read_bytes())
    return asyncio.run(_rejudge(settings, [group_from_proto(group) for group in batch.groups]))


async def _rejudge(settings: Rejudge, groups: list[Group]) -> dict[str, Any]:
    names = component_names(settings.rewards)
    rules: list[Scorer] = [Stored(name, entry.weight) for name, entry in zip(names, settings.rewards, strict=True)]
    component = next(
        (name for name, entry in zip(names, settings.rewards, strict=True) if entry.rule == settings.ruler.gate), None
    )
    ruler = RulerScorer(settings.ruler.model_copy(update={"gate": component}), salt=secrets.token_hex(8))
    await ruler.open()
    try:
        verdicts = await asyncio.gather(
            *(judge([*rules, ruler], _scorable(group), max_turns=settings.max_turns) for group in groups)
        )
    finally:
        await ruler.close()
    return {
        "groups": [_facts(group, judged) for group, judged in zip(groups, verdicts, strict=True)],
        "cost": sum(ruler.counts.cost.values()),
        "calls": sum(ruler.counts.calls.values()),
        "tokens": sum(ruler.counts.tokens.values()),
    }


def _scorable(group: Group) -> Group:
    """The group in which an episode that was not scored may be scored now."""
    return replace(
        group,
        episodes=[
            replace(episode, failure=None)
            if episode.failure is not None and episode.failure.code == UNSCORED
            else episode
            for episode in group.episodes
        ],
    )


def _facts(group: Group, judged: GroupJudgement) -> dict[str, Any]:
    stored = {episode.id: episode for episode in group.episodes}
    return {
        "scenario": group.scenario.id,
        "episodes": [
            {
                "id": judgement.episode_id,
                "old": stored[judgement.episode_id].rewards.get(NAME),
                "old_reward": stored[judgement.episode_id].reward,
                "new": judgement.rewards.get(NAME),
                "new_reward": judgement.reward,
                "failure": None if judgement.failure is None else str(judgement.failure),
                "details": judgement.details.get(NAME),
            }
            for judgement in judged.episodes
        ],
    }


if __name__ == "__main__":
    run_check(Rejudge, rejudge)
