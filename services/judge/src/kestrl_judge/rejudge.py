"""`python -m kestrl_judge.rejudge`: scores stored groups again with a ruler; run by `kestrl rejudge`.

Rules are not run again: their stored values gate the ruler and are summed with it as in the run.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrl._shared.checking import Rejudge, run_check
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.episode import UNSCORED
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
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

    async def score(
        self,
        group: EncodedGroup,
        *,
        max_turns: int,  # noqa: ARG002 - the interface of scorers
    ) -> ScoredGroup:
        verdicts: dict[str, Verdict] = {}
        for episode in group.decoded.episodes:
            missing = self.name not in episode.rewards
            verdicts[episode.id] = self._missing(episode.id) if missing else Score(value=episode.rewards[self.name])
        return ScoredGroup(verdicts)

    def _missing(self, episode_id: str) -> Failure:
        return Failure(
            boundary=Boundary.JUDGE, code="reward_missing", message=f"{episode_id} has no stored value of {self.name}"
        )


def rejudge(settings: Rejudge) -> dict[str, Any]:
    """New scores of the groups of a batch, as JSON."""
    batch = common.GroupBatch.FromString(Path(settings.batch).read_bytes())
    return asyncio.run(_rejudge(settings, list(batch.groups)))


async def _rejudge(settings: Rejudge, groups: list[common.Group]) -> dict[str, Any]:
    names = component_names(settings.rewards)
    rules: list[Scorer] = [Stored(name, entry.weight) for name, entry in zip(names, settings.rewards, strict=True)]
    component = next(
        (name for name, entry in zip(names, settings.rewards, strict=True) if entry.rule == settings.ruler.gate), None
    )
    ruler = RulerScorer(settings.ruler.model_copy(update={"gate": component}), salt=secrets.token_hex(8))
    await ruler.open()
    encoded = [EncodedGroup(_scorable(group).SerializeToString()) for group in groups]
    try:
        verdicts = await asyncio.gather(
            *(judge([*rules, ruler], group, max_turns=settings.max_turns) for group in encoded)
        )
    finally:
        await ruler.close()
    return {
        "groups": [_facts(group, judged) for group, judged in zip(groups, verdicts, strict=True)],
        "cost": sum(ruler.counts.cost.values()),
        "calls": sum(ruler.counts.calls.values()),
        "tokens": sum(ruler.counts.tokens.values()),
    }


def _scorable(group: common.Group) -> common.Group:
    """The group in which an episode that was not scored may be scored now."""
    scorable = common.Group()
    scorable.CopyFrom(group)
    for episode in scorable.episodes:
        if episode.failure.code == UNSCORED:
            episode.ClearField("failure")
    return scorable


def _reward(episode: common.Episode) -> float | None:
    return episode.reward if episode.HasField("reward") else None


def _facts(group: common.Group, judged: GroupJudgement) -> dict[str, Any]:
    stored = {episode.id: episode for episode in group.episodes}
    return {
        "scenario": group.scenario.id,
        "episodes": [
            {
                "id": judgement.episode_id,
                "old": dict(stored[judgement.episode_id].rewards).get(NAME),
                "old_reward": _reward(stored[judgement.episode_id]),
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
