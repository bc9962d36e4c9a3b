"""Groups to compare, and rulers for a scripted judge."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes.judge_model import Script, ScriptedJudge, last_answer

from kestrl._shared.plan.settings.judge import JudgeModel, RulerEntry
from kestrl.episode import CallOutcome, Episode, Group, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.episode.codec import group_to_proto
from kestrl.errors import Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.ruler.scorer import RulerScorer
from kestrl_judge.scoring import ScoredGroup, Scorer

QUESTION = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": "What is 2 + 2?"}]


def episode(index: int, *said: Mapping[str, Any] | str, calls: Sequence[ToolCall] = ()) -> Episode:
    """An episode that answers the question; texts are turns of the agent."""
    messages = [{"role": "assistant", "content": each} if isinstance(each, str) else each for each in said]
    text = str(messages[-1]["content"]) if messages else ""
    return Episode(
        id=f"g/{index}",
        group_id="g",
        scenario_id="s",
        index=index,
        seed=index,
        rows=[Row(token_ids=array("i", [1, 2]), mask=b"\0\1", logprobs=array("f", [0, -1]), policies=["p"])],
        turns=[
            Turn(index=0, row=0, start=1, end=2, text=text, finish_reason="stop", engine="e", policy="p", seconds=0.1)
        ],
        tool_calls=list(calls),
        messages=[*QUESTION, *messages],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=None,
        engine="e",
        started_at=0.0,
        seconds=1.0,
    )


def group(*episodes: Episode | str, tools: Sequence[Mapping[str, Any]] = ()) -> Group:
    made = [each if isinstance(each, Episode) else episode(index, each) for index, each in enumerate(episodes)]
    scenario = Scenario(id="s", ordinal=0, messages=QUESTION, ground_truth="4")
    return Group(id="g", scenario=scenario, episodes=made, tools=tools)


def tool_call(text: str, outcome: CallOutcome = CallOutcome.OK, name: str = "add") -> ToolCall:
    return ToolCall(turn=0, name=name, raw="", arguments={}, outcome=outcome, text=text)


def honest(trajectory: Mapping[str, Any]) -> float:
    """Score of an honest judge: 1 for the right answer, 0.2 for another one, 0 for none."""
    text = last_answer(trajectory).strip()
    return 1.0 if text.endswith("4") else 0.2 if text else 0.0


def ruler_entry(*urls: str, **given: Any) -> RulerEntry:
    judges = tuple(JudgeModel(model=f"model-{number}", base_urls=(url,)) for number, url in enumerate(urls))
    return RulerEntry.model_validate({"judges": judges, "request_seconds": 25.0, "seconds": 50.0} | given)


async def score(scorer: Scorer, group: Group) -> ScoredGroup:
    return await scorer.score(EncodedGroup(group_to_proto(group).SerializeToString()), max_turns=5)


@dataclass(frozen=True)
class Judged:
    """A ruler, and the server that it asks."""

    scorer: RulerScorer
    server: ScriptedJudge

    async def score(self, asked: Group) -> ScoredGroup:
        return await score(self.scorer, asked)

    async def values(self, asked: Group) -> list[float]:
        found = await self.score(asked)
        return [value_of(found.verdicts[each.id]) for each in asked.episodes]

    async def failure(self, asked: Group) -> Failure:
        """The failure of every episode."""
        failures = set((await self.score(asked)).verdicts.values())
        assert len(failures) == 1, failures
        failure = failures.pop()
        assert isinstance(failure, Failure), failure
        return failure


def value_of(verdict: Score | Failure) -> float:
    assert isinstance(verdict, Score), verdict
    return verdict.value


@asynccontextmanager
async def ruled(script: Script, *, state_dir: str | None = None, **given: Any) -> AsyncIterator[Judged]:
    """A ruler whose judge is scripted."""
    async with ScriptedJudge(script) as server, asyncio.timeout(30):
        scorer = RulerScorer(ruler_entry(server.url, **given), salt="run-1", state_dir=state_dir)
        await scorer.open()
        try:
            yield Judged(scorer, server)
        finally:
            await scorer.close()
