"""The ruler against a scripted judge that speaks real HTTP: what is sent, what is read, and what a failure becomes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.judge_model import Asked, Refusal, Said, ScriptedJudge, graded
from tests.fakes.mounted_secret import MountedSecret
from tests.unit.judge.rulers import QUESTION, episode, group, honest, ruled, ruler_entry, score, tool_call, value_of

from kestrl._shared.backoff import Backoff
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.ruler import client, pacing
from kestrl_judge.ruler.scorer import RulerScorer


def fair(asked: Asked) -> Said:
    return graded(asked, honest)


async def test_scores_are_matched_by_id_whatever_the_order() -> None:
    def backwards(asked: Asked) -> Said:
        scores = json.loads(graded(asked, honest).content or "")["scores"]
        return Said(content=json.dumps({"scores": scores[::-1]}))

    for number in range(8):  # other contents, so other orders
        asked = group(f"{number}: 4", f"{number}: 5", "", f"{number}! 4")
        for script in (fair, backwards):
            async with ruled(script) as judged:
                assert await judged.values(asked) == [1.0, 0.2, 0.0, 1.0]


async def test_a_judge_sees_context_tools_facts_and_what_differs() -> None:
    calls = [tool_call("4"), tool_call("?", outcome=tool_call("").outcome)]
    asked = group(
        episode(0, "I call add.", {"role": "tool", "content": "4"}, "4", calls=calls),
        "5",
        tools=[{"type": "function", "function": {"name": "add", "description": "adds <numbers>"}}],
    )
    async with ruled(fair, rubric="Right is right.") as judged:
        found = await judged.score(asked)
        sent = judged.server.asked[0]
    assert sent.context == QUESTION
    assert "Right is right." in sent.messages[0]["content"]
    assert '"name":"add"' in sent.data
    assert "adds <numbers>" not in sent.data
    assert {
        "messages": [{"role": "assistant", "content": "5"}],
        "facts": {"ended": "answered", "turns": 1, "tool_calls": {}},
    } in (list(sent.trajectories.values()))
    assert [it["facts"]["tool_calls"] for it in sent.trajectories.values() if len(it["messages"]) == 3] == [{"ok": 2}]
    assert all(name not in sent.data for name in ("g/0", "g/1"))
    assert sent.body["response_format"]["json_schema"]["strict"] is True
    assert sent.body["max_completion_tokens"] == 4096
    assert found.details["calls"][0]["messages"][1]["content"] == sent.data
    assert found.episodes["g/1"] == {"scores": [0.2], "explanation": "as scripted", "judges": ["model-0"]}


async def test_equal_and_single_episodes_are_not_judged() -> None:
    async with ruled(fair) as judged:
        assert await judged.values(group("4")) == [0.5]
        assert await judged.values(group("4", "4", "4")) == [0.5] * 3
        assert judged.server.asked == []
        verdict = (await judged.score(group("4"))).verdicts["g/0"]
        assert isinstance(verdict, Score)
        assert verdict.metrics == {"ruler_skipped": 1.0}


async def test_equal_episodes_of_a_group_share_one_trajectory() -> None:
    async with ruled(fair) as judged:
        assert await judged.values(group("4", "5", "4", "4")) == [1.0, 0.2, 1.0, 1.0]
        assert len(judged.server.asked[0].ids) == 2


async def test_a_group_in_another_order_is_known() -> None:
    async with ruled(fair) as judged:
        first = await judged.values(group("4", "5", ""))
        second = await judged.values(group("", "4", "5"))
        assert (first, second) == ([1.0, 0.2, 0.0], [0.0, 1.0, 0.2])
        assert len(judged.server.asked) == 1
        assert judged.scorer.counts.calls["model-0", "cached"] == 1


async def test_permutations_show_other_orders_and_are_averaged() -> None:
    def first_is_best(asked: Asked) -> Said:
        names = list(asked.trajectories)
        scores = [
            {"trajectory_id": name, "explanation": "", "score": 1.0 if position == 0 else 0.0}
            for position, name in enumerate(names)
        ]
        return Said(content=json.dumps({"scores": scores}))

    asked = group("4", "5", "6", "7")
    async with ruled(first_is_best, permutations=16) as judged:
        values = await judged.values(asked)
        assert len(judged.server.asked) == 16
        assert len({tuple(sent.ids) for sent in judged.server.asked}) == 16  # ids are drawn anew for each order
    assert sum(values) == pytest.approx(1.0)
    assert max(values) < 0.6


MALFORMED: list[tuple[str, Callable[[list[str]], str | None], str]] = [
    ("empty", lambda _: "", "the reply is empty"),
    ("no content", lambda _: None, "the reply is empty"),
    ("prose", lambda _: "The first one is best.", "not a JSON object"),
    ("truncated", lambda ids: json.dumps(_scores(ids))[:-9], "not a JSON object"),
    ("two objects", lambda ids: json.dumps(_scores(ids)) * 2, "not a JSON object"),
    ("a list", lambda ids: json.dumps(_scores(ids)["scores"]), 'no "scores"'),
    ("not a list", lambda ids: json.dumps({"scores": dict.fromkeys(ids, 1.0)}), '"scores" is not a list'),
    ("missing id", lambda ids: json.dumps(_scores(ids[:-1])), "no score for t-"),
    ("extra id", lambda ids: json.dumps(_scores([*ids, "t-0000000000"])), "is not one of the ids"),
    ("number as id", lambda ids: json.dumps(_scores([1, *ids])), "is not one of the ids"),
    ("duplicate id", lambda ids: json.dumps(_scores([*ids, ids[0]])), "is scored twice"),
    (
        "duplicate key",
        lambda ids: json.dumps(_scores(ids)).replace('"score"', '"score": 1, "score"', 1),
        "occurs twice",
    ),
    ("NaN", lambda ids: json.dumps(_scores(ids, float("nan"))), "NaN is not a number of JSON"),
    ("infinity", lambda ids: json.dumps(_scores(ids, float("inf"))), "Infinity is not a number"),
    ("huge", lambda ids: json.dumps(_scores(ids, 10**400)), "is not between 0 and 1"),
    ("1.7", lambda ids: json.dumps(_scores(ids, 1.7)), "the score 1.7 is not between 0 and 1"),
    ("negative", lambda ids: json.dumps(_scores(ids, -0.1)), "is not between 0 and 1"),
    ("string", lambda ids: json.dumps(_scores(ids, "0.9")), "the score is not a number"),
    ("boolean", lambda ids: json.dumps(_scores(ids, True)), "the score is not a number"),
    ("null", lambda ids: json.dumps(_scores(ids, None)), "the score is not a number"),
    ("no explanation", lambda ids: json.dumps(_scores(ids)).replace("explanation", "why"), 'no "explanation"'),
    ("deep", lambda _: "[" * 200_000, "not a JSON object"),
]


def _scores(ids: list[Any], score: Any = 0.5) -> dict[str, Any]:
    return {"scores": [{"trajectory_id": name, "explanation": "", "score": score} for name in ids]}


@pytest.mark.parametrize(("write", "why"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
async def test_a_malformed_reply_is_repaired_once_then_unscored(
    write: Callable[[list[str]], str | None], why: str
) -> None:
    def script(asked: Asked) -> Said:
        return fair(asked) if good and len(asked.messages) > 2 else Said(content=write(asked.ids))

    for good in (True, False):
        async with ruled(script) as judged:
            if good:
                assert await judged.values(group("4", "5")) == [1.0, 0.2]
                assert why in judged.server.asked[1].messages[3]["content"]
            else:
                failure = await judged.failure(group("4", "5"))
                assert (failure.boundary, failure.code, failure.retryable) == (Boundary.JUDGE, "unscored", False)
                assert why in failure.message
                assert judged.scorer.counts.unscored == {"malformed": 1}
            assert len(judged.server.asked) == 2


async def test_a_fenced_reply_is_read() -> None:
    async with ruled(lambda asked: graded(asked, honest, fence=True)) as judged:
        assert await judged.values(group("4", "5")) == [1.0, 0.2]
        assert len(judged.server.asked) == 1


async def test_a_refusal_and_a_cut_reply_are_malformed() -> None:
    async with ruled(lambda _: Said(content=None, refusal="I cannot")) as judged:
        assert "not a JSON object" in (await judged.failure(group("4", "5"))).message
    async with ruled(lambda asked: Said(content=(fair(asked).content or "")[:40], finish_reason="length")) as judged:
        assert "cut at the limit of 4096 tokens" in (await judged.failure(group("4", "5"))).message


async def test_a_second_judge_is_asked_after_the_first() -> None:
    async with ScriptedJudge(lambda _: Said(content="no")) as first, ScriptedJudge(fair) as second:
        scorer = RulerScorer(ruler_entry(first.url, second.url), salt="run")
        await scorer.open()
        found = await score(scorer, group("4", "5"))
        await scorer.close()
    assert [value_of(found.verdicts[name]) for name in ("g/0", "g/1")] == [1.0, 0.2]
    assert (len(first.asked), len(second.asked)) == (2, 1)
    assert found.episodes["g/0"]["judges"] == ["model-1"]
    assert [call["model"] for call in found.details["calls"]] == ["model-0", "model-1"]
    assert found.details["calls"][0]["error"].startswith("malformed: ")


async def test_refusals_of_the_server_are_retried_and_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "BACKOFF", Backoff(0.01, 30, jitter=0.5))
    answers: list[Refusal] = [
        Refusal(status=429, headers={"Retry-After": "0.2"}),
        Refusal(status=500),
        Refusal(status=503, headers={"retry-after-ms": "20"}),
        Refusal(status=200, body="not JSON"),
        Refusal(status=200, body="{}"),
    ]
    clock = asyncio.get_running_loop().time
    times: list[float] = []

    def script(asked: Asked) -> Said | Refusal:
        times.append(clock())
        return answers.pop(0) if answers else fair(asked)

    async with ruled(script) as judged:
        assert await judged.values(group("4", "5")) == [1.0, 0.2]
        assert len(judged.server.asked) == 6
    assert times[1] - times[0] >= 0.2


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (Refusal(status=401, message="wrong key"), "refused): model-0: status 401", 1),
        (Refusal(status=404, message="no such model"), "refused): model-0: status 404", 1),
        (Refusal(status=400, message="response_format is not supported"), "refused): model-0: status 400", 1),
        (Refusal(status=503, headers={"retry-after-ms": "1"}), "unavailable): model-0: status 503", 6),
        (Refusal(status=429, headers={"Retry-After": "0"}), "unavailable): model-0: status 429", 6),
    ],
    ids=["401", "404", "400", "503", "429"],
)
async def test_a_server_that_keeps_refusing_leaves_the_group_unscored(
    answer: Refusal, reason: str, requests: int
) -> None:
    async with ruled(lambda _: answer) as judged:
        failure = await judged.failure(group("4", "5"))
        assert failure.code == "unscored"
        assert reason in failure.message
        assert len(judged.server.asked) == requests


async def test_a_silent_server_is_bounded_by_the_time_limit() -> None:
    never = asyncio.Event()
    async with ruled(lambda _: Said(content="", after=never), request_seconds=0.2, seconds=0.5) as judged:
        failure = await judged.failure(group("4", "5"))
    assert "(timeout)" in failure.message
    assert judged.scorer.counts.unscored == {"timeout": 1}


async def test_an_unreachable_server_is_reported() -> None:
    scorer = RulerScorer(ruler_entry("http://127.0.0.1:1/v1", seconds=1.0), salt="run")
    await scorer.open()
    found = await score(scorer, group("4", "5"))
    await scorer.close()
    failure = found.verdicts["g/0"]
    assert not isinstance(failure, Score)
    assert failure.code == "unscored"


async def test_concurrency_is_bounded_and_halved_by_refusals() -> None:
    running = asyncio.Event()
    groups = [group(f"{number} 4", f"{number} 5") for number in range(12)]

    async def script(asked: Asked) -> Said:
        if asked.index == 2:
            running.set()
        await running.wait()
        return fair(asked)

    async with ruled(script, concurrency=3) as judged:
        await asyncio.gather(*(judged.values(each) for each in groups))
        assert judged.server.most_running == 3
        judged.server.script = lambda asked: (
            Refusal(status=429, headers={"Retry-After": "0.01"}) if asked.index == 12 else fair(asked)
        )
        await judged.values(group("again 4", "again 5"))
        pacer = judged.scorer._asker._clients[0].pacer  # type: ignore[union-attr]
        assert 1.0 <= pacer.limit < 3.0


async def test_a_long_group_is_shortened_from_its_beginning_and_says_so() -> None:
    long = ["word " * 4000 + f"answer {number}4" for number in range(3)]
    asked = group(episode(0, "early", long[0]), episode(1, "early", long[1]), episode(2, "short 5"))
    async with ruled(fair, max_prompt_tokens=3000) as judged:
        assert await judged.values(asked) == [1.0, 1.0, 0.2]
        sent = judged.server.asked[0]
    assert sum(len(message["content"]) for message in sent.messages) < 3 * 3000
    texts = [it["messages"][-1]["content"] for it in sent.trajectories.values()]
    assert sum("characters removed by the grading program" in text for text in texts) == 2
    assert "short 5" in texts
    assert "was shortened by the grading program" in sent.data


async def test_a_prompt_that_the_server_refuses_as_too_long_is_shortened() -> None:
    def script(asked: Asked) -> Said | Refusal:
        if len(asked.data) > 6000:
            return Refusal(status=400, message="maximum context length is 2048 tokens", code="context_length_exceeded")
        return fair(asked)

    asked = group(*("word " * 5000 + f"{number}4" for number in range(2)))
    async with ruled(script, max_prompt_tokens=8000) as judged:
        assert await judged.values(asked) == [1.0, 1.0]
        assert len(judged.server.asked) > 1
    async with ruled(lambda _: Refusal(status=400, code="context_length_exceeded")) as judged:
        assert "(too_large)" in (await judged.failure(asked)).message


async def test_a_budget_is_never_exceeded() -> None:
    async with ruled(fair, budget_calls=3) as judged:
        results = await asyncio.gather(*(judged.score(group(f"{n} 4", f"{n} 5")) for n in range(6)))
        assert len(judged.server.asked) == 3
    failed = [each.verdicts["g/0"] for each in results if not isinstance(each.verdicts["g/0"], Score)]
    assert len(failed) == 3
    assert "raise spec.rewards[0].ruler.budget.calls" in failed[0].message
    async with ruled(fair, budget_tokens=100) as judged:
        assert "budget of 100 tokens" in (await judged.failure(group("4", "5"))).message
        assert judged.server.asked == []


async def test_a_restarted_judge_neither_asks_nor_pays_twice(tmp_path: Path) -> None:
    asked, state = group("4", "5"), str(tmp_path)
    async with ruled(fair, state_dir=state, budget_calls=2) as judged:
        assert await judged.values(asked) == [1.0, 0.2]
        address = judged.server.url
        with (tmp_path / "ruler.jsonl").open("a") as journal:
            journal.write('{"key": "cut by the end of the proc')
        again = RulerScorer(ruler_entry(address, budget_calls=2), salt="run-1", state_dir=state)
        await again.open()
        found = await score(again, asked)
        assert [value_of(found.verdicts[name]) for name in ("g/0", "g/1")] == [1.0, 0.2]
        assert len(judged.server.asked) == 1
        assert isinstance((await score(again, group("6", "4"))).verdicts["g/0"], Score)
        assert not isinstance((await score(again, group("7", "4"))).verdicts["g/0"], Score)
        await again.close()


async def test_a_caller_that_gives_up_does_not_pay_twice() -> None:
    received, released = asyncio.Event(), asyncio.Event()

    async def script(asked: Asked) -> Said:
        received.set()
        await released.wait()
        return fair(asked)

    async with ruled(script) as judged:
        first = asyncio.create_task(judged.values(group("4", "5")))
        await received.wait()
        first.cancel()
        second = asyncio.create_task(judged.values(group("4", "5")))
        released.set()
        assert await second == [1.0, 0.2]
        assert len(judged.server.asked) == 1


async def test_usage_and_cost_are_metered() -> None:
    async with ScriptedJudge(
        lambda asked: Said(content=fair(asked).content, input_tokens=1000, output_tokens=100)
    ) as server:
        entry = ruler_entry(server.url)
        priced = entry.judges[0].model_copy(update={"input_price": 2.0, "output_price": 10.0})
        scorer = RulerScorer(entry.model_copy(update={"judges": (priced,)}), salt="run")
        await scorer.open()
        await score(scorer, group("4", "5"))
        await scorer.close()
    counts = scorer.counts
    assert counts.calls == {("model-0", "ok"): 1}
    assert counts.tokens == {("model-0", "input"): 1000, ("model-0", "output"): 100}
    assert counts.cost["model-0"] == pytest.approx(0.003)
    assert counts.seconds["model-0"] > 0


async def test_a_server_without_usage_is_metered_by_the_estimate() -> None:
    async with ruled(
        lambda asked: Said(content=fair(asked).content, input_tokens=0, output_tokens=0), budget_tokens=8000
    ) as judged:
        await judged.values(group("4", "5"))
        counts = judged.scorer.counts.tokens
        assert counts["model-0", "input"] > 400
        assert counts["model-0", "output"] > 20


async def test_the_key_is_sent_and_never_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("KESTRL_JUDGE_KEY_0", "sk-secret")
    caplog.set_level(logging.DEBUG, logger="kestrl_judge")
    async with ScriptedJudge(fair) as server:
        entry = ruler_entry(server.url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        found = await score(scorer, group("4", "5"))
        await scorer.close()
    assert server.asked[0].headers["Authorization"] == "Bearer sk-secret"
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("kestrl_judge"))
    assert "messages: " in logged
    assert "raw content: " in logged
    assert "scores 1: as scripted" in logged
    assert "sk-secret" not in logged + json.dumps(found.details)


async def test_a_rotated_key_is_sent_from_the_next_request_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path / "mounted")
    monkeypatch.setenv("KESTRL_USER_SECRETS", str(mounted.folder))
    monkeypatch.setenv("KESTRL_JUDGE_KEY_0", "sk-of-the-start")
    async with ScriptedJudge(fair) as server:
        entry = ruler_entry(server.url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        for key in ("sk-old-key", "sk-new-key"):
            mounted.write({"KESTRL_JUDGE_KEY_0": key})
            await score(scorer, group(f"{key}: 4", "5"))
            assert server.asked[-1].headers["Authorization"] == f"Bearer {key}"
        await scorer.close()


async def test_a_key_that_is_accepted_no_more_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server knows the new key before the file has it; one that it never accepted is refused at once."""
    monkeypatch.setattr(client, "ROTATION_PAUSE", 0.05)
    mounted = MountedSecret(tmp_path / "mounted")
    monkeypatch.setenv("KESTRL_USER_SECRETS", str(mounted.folder))
    mounted.write({"KESTRL_JUDGE_KEY_0": "sk-old-key"})
    accepted = ["sk-old-key"]

    def script(asked: Asked) -> Said | Refusal:
        if asked.headers["Authorization"] == f"Bearer {accepted[0]}":
            return fair(asked)
        if len(server.asked) == 4:
            mounted.write({"KESTRL_JUDGE_KEY_0": accepted[0]})
        return Refusal(status=401, message="wrong key")

    async with ScriptedJudge(script) as server:
        entry = ruler_entry(server.url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        await score(scorer, group("4", "5"))
        accepted[0] = "sk-new-key"
        scored = await score(scorer, group("6", "7"))
        assert len(server.asked) == 5
        accepted[0] = "sk-unknown"
        refused = await score(scorer, group("8", "9"))
        assert len(server.asked) == 5 + client.ATTEMPTS
        await scorer.close()
    assert not any(isinstance(verdict, Failure) for verdict in scored.verdicts.values())
    assert_waited_for(refused.verdicts.values())


def assert_waited_for(verdicts: Collection[object]) -> None:
    """The failures are those that a learner waits for."""
    failures = [verdict for verdict in verdicts if isinstance(verdict, Failure)]
    assert len(failures) == len(verdicts)
    assert {(failure.code, failure.retryable) for failure in failures} == {("judge_unauthorized", True)}
    assert all("put the new one into the Secret" in failure.message for failure in failures)


def end_of_time(_attempt: int, _asked: float | None) -> float:
    """The time limit of a group, reached before another attempt."""
    raise TimeoutError


async def test_a_key_that_is_not_replaced_in_time_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_JUDGE_KEY_0", "sk-old-key")
    accepted = ["sk-old-key"]

    def script(asked: Asked) -> Said | Refusal:
        known = asked.headers["Authorization"] == f"Bearer {accepted[0]}"
        return fair(asked) if known else Refusal(status=401, message="wrong key")

    async with ScriptedJudge(script) as server:
        entry = ruler_entry(server.url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        await score(scorer, group("4", "5"))
        accepted[0] = "sk-new-key"
        monkeypatch.setattr(client, "pause_before", end_of_time)
        refused = await score(scorer, group("6", "7"))
        await scorer.close()
    assert_waited_for(refused.verdicts.values())


async def test_every_request_counts_in_the_budget() -> None:
    """A request that is repeated after its time limit may have been answered, and billed, each time."""

    async def slow(asked: Asked) -> Said:
        await asyncio.sleep(0.4)
        return fair(asked)

    async with ruled(slow, request_seconds=0.2, budget_calls=2) as judged:
        failure = await judged.failure(group("4", "5"))
        assert len(judged.server.asked) == 2
        assert "budget of 2 calls" in failure.message
    async with ruled(lambda _: Refusal(status=503), budget_calls=3) as judged:
        await judged.failure(group("4", "5"))
        assert len(judged.server.asked) == 3


@pytest.mark.parametrize("reported", [(-(10**6), -(10**6)), (10**15, 10**15), (0, 0)], ids=["negative", "huge", "none"])
async def test_impossible_reports_of_tokens_are_replaced_by_estimates(reported: tuple[int, int]) -> None:
    sent, sampled = reported
    async with ruled(
        lambda asked: replace(fair(asked), input_tokens=sent, output_tokens=sampled), budget_tokens=50_000
    ) as judged:
        for number in range(3):
            assert await judged.values(group("4", f"{number} 5")) == [1.0, 0.2]
        counts = judged.scorer.counts.tokens
        assert 1000 < counts["model-0", "input"] < 20_000
        assert 20 < counts["model-0", "output"] < 5000


async def test_half_an_emoji_in_an_explanation_loses_nothing() -> None:
    async with ruled(
        lambda asked: replace(fair(asked), content=str(fair(asked).content).replace("as scripted", "\\ud83d cut"))
    ) as judged:
        found = await judged.score(group("4", "5"))
        json.dumps(found.details, ensure_ascii=False).encode()
        assert [value_of(found.verdicts[name]) for name in ("g/0", "g/1")] == [1.0, 0.2]


async def test_a_key_that_the_server_repeats_reaches_nobody(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("KESTRL_JUDGE_KEY_0", "sk-canary-0123")
    caplog.set_level(logging.DEBUG, logger="kestrl_judge")
    refusal = Refusal(status=401, message="Incorrect API key provided: Bearer sk-canary-0123")
    async with ScriptedJudge(lambda _: refusal) as server:
        entry = ruler_entry(server.url)
        keyed = entry.judges[0].model_copy(update={"key_variable": "KESTRL_JUDGE_KEY_0"})
        scorer = RulerScorer(entry.model_copy(update={"judges": (keyed,)}), salt="run")
        await scorer.open()
        found = await score(scorer, group("4", "5"))
        await scorer.close()
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("kestrl_judge"))
    shown = logged + json.dumps(found.details) + str(found.verdicts)
    assert "Incorrect API key provided: Bearer [redacted]" in shown
    assert "canary" not in shown
