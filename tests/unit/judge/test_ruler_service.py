"""The judge service with rules and a ruler, over gRPC: modes of the reward, what is stored, and its secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.judge_model import Asked, Said, ScriptedJudge, graded
from tests.unit.judge.rulers import group, honest, ruler_entry

from kestrl._shared.plan.settings.judge import JudgeSettings, RewardEntry
from kestrl.episode import Group
from kestrl_judge.service import run_judge


def fair(asked: Asked) -> Said:
    return graded(asked, honest)


@pytest.fixture
def serve(connect: Any, settings: Callable[..., JudgeSettings]) -> Any:
    """`async with serve(*rules, ruler=...) as client`."""
    import asyncio
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def serving(*rules: RewardEntry, ruler: Any) -> Any:
        wanted = settings(*rules).model_copy(update={"ruler": ruler})
        stop = asyncio.Event()
        service = asyncio.create_task(run_judge(wanted, until=stop.wait()))
        async with connect(wanted.listen) as client:
            try:
                yield client
            finally:
                stop.set()
                await service

    return serving


EXACT = RewardEntry(name="exact_answer", rule="exact_answer")
MODES = [
    ("ruler", (), {}, [1.0, 1.0, 0.2, 0.0]),
    ("weighted sum", (EXACT,), {"weight": 0.5}, [1.5, 0.5, 0.1, 0.0]),
    ("recorded rule", (EXACT.model_copy(update={"weight": 0.0}),), {}, [1.0, 1.0, 0.2, 0.0]),
    ("gated", (EXACT,), {"gate": "exact_answer"}, [1.5, 0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("rules", "given", "expected"), [mode[1:] for mode in MODES], ids=[mode[0] for mode in MODES])
async def test_modes(serve: Any, rules: tuple[RewardEntry, ...], given: dict[str, Any], expected: list[float]) -> None:
    asked: Group = group("4", "So 4", "5", "")
    async with ScriptedJudge(fair) as judge, serve(*rules, ruler=ruler_entry(judge.url, **given)) as client:
        scores = await client.score(asked)
    assert [round(score.reward, 6) for score in scores] == expected
    if rules:
        assert [score.rewards["exact_answer"] for score in scores] == [1.0, 0.0, 0.0, 0.0]


async def test_what_the_judge_was_asked_and_replied_is_returned(serve: Any) -> None:
    async with ScriptedJudge(fair) as judge, serve(ruler=ruler_entry(judge.url)) as client:
        answer = await client.ask(group("4", "5"))
    details = json.loads(answer.details_json)["ruler"]["calls"][0]
    assert details["messages"][0]["role"] == "system"
    assert json.loads(details["content"])["scores"][0]["explanation"] == "as scripted"
    episode = json.loads(answer.scores[0].details_json)["ruler"]
    assert episode == {"scores": [1.0], "explanation": "as scripted", "judges": ["model-0"]}


async def test_an_unscored_group_has_no_reward_and_keeps_its_rules(serve: Any) -> None:
    async with (
        ScriptedJudge(lambda _: Said(content="no")) as judge,
        serve(EXACT, ruler=ruler_entry(judge.url)) as client,
    ):
        scores = await client.score(group("4", "5"))
    assert [score.failure.code for score in scores] == ["unscored", "unscored"]
    assert not any(score.HasField("reward") for score in scores)
    assert [score.rewards["exact_answer"] for score in scores] == [1.0, 0.0]
    assert scores[0].failure.component == "judge-0"
