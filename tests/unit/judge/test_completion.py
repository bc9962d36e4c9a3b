"""What a judge's server may answer in place of a completion, through its real client, and what it may report."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.fakes.hostile_values import DOCUMENTS, TEXTS
from tests.fakes.judge_model import Asked, Refusal, graded

from kestrl_judge.ruler.client import NoScoresReason
from kestrl_judge.ruler.completion import NotACompletion, read_reply
from kestrl_judge.ruler.scorer import RulerScorer

from .rulers import group, honest, ruled, ruler_entry, score

ALMOST = {
    "choices": '{{"choices": {0}}}',
    "choice": '{{"choices": [{0}]}}',
    "message": '{{"choices": [{{"message": {0}}}]}}',
    "content": '{{"choices": [{{"message": {{"content": {0}}}}}]}}',
    "refusal": '{{"choices": [{{"message": {{"refusal": {0}}}}}]}}',
    "finish reason": '{{"choices": [{{"message": {{"content": "a"}}, "finish_reason": {0}}}]}}',
    "usage": '{{"choices": [{{"message": {{"content": "a"}}}}], "usage": {0}}}',
    "tokens": '{{"choices": [{{"message": {{"content": "a"}}}}], "usage": {{"prompt_tokens": {0}}}}}',
    "all": "{0}",
}


@pytest.mark.parametrize("place", ALMOST)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_an_answer_is_a_reply_or_none(place: str, document: str) -> None:
    body = ALMOST[place].format(DOCUMENTS[document]).encode("utf-8", "surrogatepass")
    try:
        reply = read_reply(body)
    except NotACompletion as error:
        check_message(error)
        return
    (reply.content + reply.finish_reason).encode()
    assert 0 <= reply.input_tokens < 10**12
    assert len(reply.finish_reason) <= 100


def check_message(error: NotACompletion) -> None:
    assert len(str(error).encode()) < 1_000


REPORTS: dict[str, Any] = {
    "negative": -(10**6),
    "huge": 10**15,
    "huger": 10**400,
    "below what was sent": 1,
    "nothing": 0,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "a fraction": 0.5,
    "true": True,
    "text": "12",
    "a list": [1],
    "null": None,
}


@pytest.mark.parametrize("reported", REPORTS)
async def test_what_a_server_reports_neither_saves_nor_ends_the_budget(reported: str) -> None:
    number = REPORTS[reported]

    def script(asked: Asked) -> Refusal:
        choice = {"message": {"role": "assistant", "content": graded(asked, honest).content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": number, "completion_tokens": number}
        return Refusal(status=200, body=json.dumps({"choices": [choice], "usage": usage}))

    async with ruled(script, budget_tokens=50_000) as judged:
        assert await judged.values(group("4", "5")) == [1.0, 0.2]
        counts = judged.scorer.counts.tokens
        assert 400 < counts["model-0", "input"] < 5_000
        assert 20 < counts["model-0", "output"] < 2_000


async def no_usage(asked: Asked) -> Refusal:
    return Refusal(status=200, body=json.dumps({"choices": [{"message": {"content": graded(asked, honest).content}}]}))


async def test_an_answer_without_usage_is_metered() -> None:
    async with ruled(no_usage) as judged:
        assert await judged.values(group("4", "5")) == [1.0, 0.2]
        assert judged.scorer.counts.tokens["model-0", "input"] > 400


async def bomb(request: web.Request) -> web.StreamResponse:
    """100 MB of white space in 100 KB."""
    body = gzip.compress(b" " * 100_000_000)
    return web.Response(body=body, status=int(request.match_info["status"]), headers={"Content-Encoding": "gzip"})


async def flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=int(request.match_info["status"]))
    await response.prepare(request)
    try:
        for _ in range(2_000):
            await response.write(b" " * 1_000_000)
    except ConnectionError:
        pass
    return response


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    runners: list[web.AppRunner] = []

    async def start(handler: Any) -> str:
        app = web.Application()
        app.router.add_post("/{status}/chat/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("status", [200, 401, 500])
@pytest.mark.parametrize("handler", [bomb, flood])
async def test_a_long_answer_is_not_read(
    handler: Any, status: int, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl_judge.ruler.client.ATTEMPTS", 1)
    url = await serve(handler)
    scorer = RulerScorer(ruler_entry(f"{url}/{status}"), salt="run")
    await scorer.open()
    message = str((await score(scorer, group("4", "5"))).verdicts)
    await scorer.close()
    assert f"({NoScoresReason.UNAVAILABLE})" in message
    assert "longer than" in message


def test_every_text_of_the_corpus_is_a_content() -> None:
    for text in TEXTS.values():
        read_reply(json.dumps({"choices": [{"message": {"content": text}}]}).encode()).content.encode()
