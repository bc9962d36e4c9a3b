"""Correctness by a judge model: a rule asks whether an answer is right, over gRPC and real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.judge_model import Asked, Refusal, Said, ScriptedJudge, decided
from tests.unit.judge.rulers import group

from kestrl._shared.plan.settings.judge import JudgeEntry, JudgeModel, JudgeSettings, RewardEntry
from kestrl.rewards import Claim
from kestrl_judge.bank.attacks import INJECTIONS, MASTER_KEYS
from kestrl_judge.correctness import build_prompt
from kestrl_judge.service import run_judge

ASKS = RewardEntry(name="asks", rule="reward_samples:asks", asks_judge=True)


def honest(asked: Asked) -> Said:
    """The verdict of an honest judge."""
    return decided(asked, lambda answer: answer.strip().casefold() in {"four", "it is four", "quatre"})


def entry(*urls: str, **given: Any) -> JudgeEntry:
    judges = tuple(JudgeModel(model=f"model-{number}", base_urls=(url,)) for number, url in enumerate(urls))
    return JudgeEntry.model_validate({"judges": judges, "request_seconds": 25.0, "seconds": 50.0} | given)


@pytest.fixture
def serve(connect: Any, settings: Callable[..., JudgeSettings]) -> Any:
    """`async with serve(correctness, *rules) as client`."""

    @asynccontextmanager
    async def serving(
        correctness: JudgeEntry | None, *rules: RewardEntry, state_dir: str | None = None
    ) -> AsyncIterator[Any]:
        changes = {"correctness": correctness, "state_dir": state_dir}
        wanted = settings(*(rules or (ASKS,))).model_copy(update=changes)
        stop = asyncio.Event()
        service = asyncio.create_task(run_judge(wanted, until=stop.wait()))
        async with connect(wanted.listen) as client:
            try:
                yield client
            finally:
                stop.set()
                await service

    return serving


async def test_the_judge_decides_and_equal_answers_are_asked_once(serve: Any) -> None:
    async with ScriptedJudge(honest) as judge, serve(entry(judge.url)) as client:
        reply = await client.ask(group("four", "five", "four", "It is four"))
        assert [score.reward for score in reply.scores] == [1.0, 0.0, 1.0, 1.0]
        assert len(judge.asked) == 3
        _, data = judge.asked[0].answer
        assert data == {"question": "What is 2 + 2?", "accepted_answers": ["4", "IV"], "answer": "four"}
    assert json.loads(reply.scores[1].details_json)["asks"] == [
        {"correct": False, "explanation": "as scripted", "model": "model-0"}
    ]
    calls = json.loads(reply.details_json)["asks"]["calls"]
    assert len(calls) == 4
    assert '"correct": true' in calls[0]["content"]


async def test_a_rule_without_a_judge_decides_itself(serve: Any) -> None:
    async with ScriptedJudge(honest) as judge, serve(None) as client:
        assert [score.reward for score in await client.score(group("four"))] == [-1.0]
        assert judge.asked == []


async def test_an_async_rule_asks_too(serve: Any) -> None:
    late = RewardEntry(name="late", rule="reward_samples:asks_late", asks_judge=True)
    async with ScriptedJudge(honest) as judge, serve(entry(judge.url), late) as client:
        assert [score.reward for score in await client.score(group("quatre", "cinq"))] == [1.0, 0.0]


async def test_answers_without_a_word_are_wrong_and_never_sent(serve: Any) -> None:
    async with ScriptedJudge(lambda asked: decided(asked, lambda _: True)) as judge, serve(entry(judge.url)) as client:
        assert [score.reward for score in await client.score(group("", " ", ":", "...", "!?"))] == [0.0] * 5
        assert judge.asked == []


@pytest.mark.parametrize("texts", [list(MASTER_KEYS), list(INJECTIONS.values())], ids=["master keys", "injections"])
async def test_hostile_answers_arrive_as_data_and_earn_nothing(serve: Any, texts: list[str]) -> None:
    async with ScriptedJudge(honest) as judge, serve(entry(judge.url)) as client:
        scores = await client.score(group(*texts))
        assert [score.reward for score in scores] == [0.0] * len(texts)
        sent = {asked.answer[1]["answer"] for asked in judge.asked}
        assert sent == {text for text in texts if any(map(str.isalnum, text))}
        for asked in judge.asked:
            block = asked.data.partition("\n")[2].partition("\n</answer>")[0]
            assert not any(mark in block for mark in ("<", ">", "[INST]", "\u200b"))


async def test_a_malformed_verdict_is_repaired_then_another_judge_asked(serve: Any) -> None:
    replies = iter(['{"correct": true}', '{"answer_id": "a-1", "explanation": "", "correct": true}'])

    async with (
        ScriptedJudge(lambda _: Said(content=next(replies))) as first,
        ScriptedJudge(honest) as second,
        serve(entry(first.url, second.url)) as client,
    ):
        assert [score.reward for score in await client.score(group("four"))] == [1.0]
        assert len(first.asked) == 2
        assert '"answer_id"' in first.asked[1].messages[-1]["content"]
        assert "which is true or false" in first.asked[1].messages[-1]["content"]


@pytest.mark.parametrize(
    ("reply", "given", "why"),
    [
        (Said(content='{"answer_id": "x", "explanation": "", "correct": 1}'), {}, "malformed"),
        (Refusal(status=401, message="no key"), {}, "not scored"),
        (Said(content="{}"), {"budget_calls": 1}, "budget of 1 calls"),
        (Said(content="{}"), {"max_prompt_tokens": 256}, "maxPromptTokens"),
    ],
)
async def test_what_is_not_decided_is_unscored_never_zero(
    serve: Any, reply: Said | Refusal, given: dict[str, Any], why: str
) -> None:
    async with ScriptedJudge(lambda _: reply) as judge, serve(entry(judge.url, **given)) as client:
        (score,) = await client.score(group("four"))
    assert not score.HasField("reward")
    assert score.failure.code == "unscored"
    assert why in score.failure.message


async def test_a_restarted_judge_asks_nothing_twice(serve: Any, tmp_path: Path) -> None:
    async with ScriptedJudge(honest) as judge:
        for _ in range(2):
            async with serve(entry(judge.url), state_dir=str(tmp_path)) as client:
                assert [score.reward for score in await client.score(group("four"))] == [1.0]
        assert len(judge.asked) == 1


async def test_a_reward_cannot_ask_without_end(serve: Any) -> None:
    often = RewardEntry(name="often", rule="reward_samples:asks_often", asks_judge=True)
    async with ScriptedJudge(honest) as judge, serve(entry(judge.url), often) as client:
        (score,) = await client.score(group("four"))
        assert score.failure.code == "too_many_claims"
        assert len(judge.asked) <= 5


def test_a_prompt_does_not_depend_on_the_run_but_by_its_ids() -> None:
    claim = Claim("?", ("4",), "four")
    first, again, other = (build_prompt(claim, salt=salt, tokens=4096) for salt in ("a", "a", "b"))
    assert first.messages == again.messages
    assert first.ids != other.ids
    enforced = first.form.schema(strict_tokens=600)
    assert enforced["properties"]["answer_id"] == {"const": first.ids[0]}
    assert list(enforced["properties"]) == ["answer_id", "explanation", "correct"]
