"""The service over the wire: sessions, outcomes, failures, deadlines, draining."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.errors import Boundary, FailureError


def tool(name: str, use: str, **config: Any) -> ToolEntry:
    return ToolEntry(name=name, use=use if ":" in use else f"tool_samples:{use}", config=config)


GREET = tool("greet", "greet")
NOTEBOOK = tool("notebook", "Notebook")
MOODY = tool("moody", "moody")


async def test_tools_are_listed_in_manifest_order(serve: Any) -> None:
    async with serve(NOTEBOOK, GREET, tool("calculator", "kestrl_tools.calculator:calculator")) as client:
        listed = await client.list()
    assert [each.name for each in listed] == ["notebook", "greet", "calculator"]
    assert listed[1].description == "Says hello."
    assert json.loads(listed[1].parameters_json)["properties"]["times"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 3,
        "default": 1,
        "description": "How often.",
    }


async def test_a_call_is_answered_as_text_or_json(serve: Any) -> None:
    async with serve(GREET, tool("shout", "shout", mark="!"), MOODY) as client:
        session = await client.open()
        greeted = await client.call(session, "greet", {"name": "you", "times": 2})
        shouted = await client.call(session, "shout", {"text": "hé"})
        nothing = await client.call(session, "moody", {"mood": "calm"})
    assert (greeted.outcome, greeted.text, greeted.final, greeted.data_json) == (
        "ok",
        "hello you hello you",
        False,
        "{}",
    )
    assert shouted.text == '{"said": "HÉ!"}'
    assert nothing.text == "null"


async def test_a_session_remembers_and_no_other_sees_it(serve: Any, samples: Any) -> None:
    async with serve(NOTEBOOK) as client:
        kwargs = {"notebook": {"create_kwargs": {"owner": "ann", "first": "zero"}}}
        first = await client.open(kwargs=kwargs)
        second = await client.open(kwargs={"notebook": {"create_kwargs": {"owner": "bob"}}})
        assert first != second
        assert len(first) >= 32
        assert (await client.call(first, "notebook", {"note": "one"})).text == '["zero", "one"]'
        assert (await client.call(first, "notebook", {"note": "two"})).text == '["zero", "one", "two"]'
        assert (await client.call(second, "notebook", {"note": "own"})).text == '["own"]'
        await client.close(first)
        await client.close(first)
        assert samples.events.closed == ["ann"]
        with pytest.raises(FailureError, match="closed, expired or unknown") as caught:
            await client.call(first, "notebook", {"note": "three"})
        assert caught.value.code == "unknown_session"
    assert samples.events.closed == ["ann", "bob"]  # draining closed the other


async def test_a_final_answer_with_data_and_what_only_the_scenario_fills(serve: Any) -> None:
    async with serve(tool("finish", "Finish")) as client:
        session = await client.open(kwargs={"finish": {"execute_kwargs": {"expected": "72"}}})
        assert "expected" not in (await client.list())[0].parameters_json
        meddled = await client.call(session, "finish", {"answer": "1", "expected": "1"})
        answer = await client.call(session, "finish", {"answer": "72"})
    assert json.loads(meddled.data_json) == {"right": False}
    assert (answer.text, answer.final, json.loads(answer.data_json)) == ("thank you", True, {"right": True})


async def test_execute_kwargs_override_the_models_arguments(serve: Any) -> None:
    async with serve(GREET) as client:
        session = await client.open(kwargs={"greet": {"execute_kwargs": {"name": "scenario"}}})
        assert (await client.call(session, "greet", {})).text == "hello scenario"
        assert (await client.call(session, "greet", {"name": 5})).text == "hello scenario"


@pytest.mark.parametrize(
    ("name", "raw", "outcome", "text"),
    [
        ("absent", "{}", "unknown_tool", "There is no tool 'absent'. The tools are: greet, moody."),
        ("greet", "{}", "schema_violation", "greet was not called: argument 'name' is missing."),
        (
            "greet",
            '{"name": 1}',
            "schema_violation",
            "greet was not called: argument 'name' must be a string, but is the number 1.",
        ),
        (
            "greet",
            '{"name": NaN}',
            "schema_violation",
            'greet was not called: the arguments must be an object, but are the string "{\\"name\\": NaN}".',
        ),
        ("greet", "[" * 100_000, "schema_violation", None),
        ("greet", '{"\\ud800": 1}', "schema_violation", None),
        ("moody", '{"mood": "refuse"}', "tool_error", "not today"),
        ("moody", '{"mood": "surrogate"}', "ok", "a?b"),
    ],
)
async def test_what_the_model_can_fix_is_an_outcome(
    serve: Any, name: str, raw: str, outcome: str, text: str | None
) -> None:
    async with serve(GREET, MOODY) as client:
        answer = await client.call(await client.open(), name, raw=raw)
    assert answer.outcome == outcome
    assert text is None or answer.text == text


async def test_a_very_long_observation_is_cut(serve: Any) -> None:
    async with serve(MOODY) as client:
        answer = await client.call(await client.open(), "moody", {"mood": "long"})
    assert answer.text.endswith("[cut: 1000000 more characters]")


@pytest.mark.parametrize(
    ("mood", "code", "message"),
    [
        ("raise", "tool_raised", "moody: KeyError: 'lost'"),
        ("exit", "tool_raised", "moody: SystemExit: 3"),
        ("interrupt", "tool_raised", "moody: KeyboardInterrupt"),
        ("generator", "tool_raised", "moody: GeneratorExit: closed"),
        ("group", "tool_raised", "moody: BaseExceptionGroup: both (2 sub-exceptions)"),
        ("own", "tool_raised", "moody: Own: base"),
        ("mute", "tool_raised", "moody: Mute: (its __str__ raised KeyboardInterrupt)"),
        ("mute refusal", "tool_raised", "moody: the text of its MuteRefusal: ValueError: mute"),
        ("cancel", "tool_raised", "moody: cancelled itself"),
        ("stop", "tool_raised", "moody: RuntimeError: coroutine raised StopIteration"),
        ("set", "tool_result_invalid", "moody: its result has no JSON form"),
        ("nan", "tool_result_invalid", "moody: its result has no JSON form"),
        ("deep data", "tool_result_invalid", "moody: its data cannot be passed on: it is nested more than 64 levels"),
        ("no mapping", "tool_result_invalid", "moody: its data are a list, not a mapping"),
        ("wordy", "wordy", "word word"),
    ],
)
@pytest.mark.parametrize("use", ["moody", "MoodyClass"])
async def test_an_exception_of_a_tool_is_a_tool_failure(
    serve: Any,
    caplog: pytest.LogCaptureFixture,
    use: str,
    mood: str,
    code: str,
    message: str,
) -> None:
    async with serve(tool("moody", use)) as client:
        session = await client.open()
        with pytest.raises(FailureError) as caught:
            await client.call(session, "moody", {"mood": mood})
        failure = caught.value.failure()
        assert (failure.boundary, failure.code, failure.component) == (Boundary.TOOL, code, "tools-0")
        assert failure.message.startswith(message)
        assert "Traceback" not in failure.message
        # The service and the session are as they were.
        assert (await client.call(session, "moody", {"mood": "calm"})).outcome == "ok"
    if code == "tool_raised" and mood not in ("cancel", "mute refusal"):
        assert any("tool moody raised" in record.message and record.exc_info for record in caplog.records)


async def test_a_task_of_a_tool_cannot_end_the_service(serve: Any) -> None:
    async with serve(tool("nested", "nested"), GREET) as client:
        session = await client.open()
        with pytest.raises(FailureError, match="KeyboardInterrupt") as caught:
            await client.call(session, "nested")
        assert (caught.value.boundary, caught.value.code) == (Boundary.USER_CODE, "user_code_raised")
        assert (await client.call(session, "greet", {"name": "you"})).outcome == "ok"


@pytest.mark.parametrize("mood", ["exit", "interrupt", "generator", "group", "own", "mute"])
async def test_an_exception_while_creating_a_tool_is_a_tool_failure(serve: Any, mood: str) -> None:
    async with serve(tool("moody", "MoodyClass"), GREET) as client:
        with pytest.raises(FailureError, match="moody: ") as caught:
            await client.open(kwargs={"moody": {"create_kwargs": {"mood": mood}}})
        assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_raised")
        assert (await client.call(await client.open(), "greet", {"name": "you"})).outcome == "ok"


@pytest.mark.parametrize("use", ["hang", "hang_politely", "stubborn"])
async def test_a_deadline_is_kept_whatever_the_tool_does(serve: Any, samples: Any, use: str) -> None:
    try:
        async with serve(tool("slow", use), GREET, call_seconds=1.0) as client:
            session = await client.open()
            with pytest.raises(FailureError, match=r"slow: the call took longer than 1 s") as caught:
                await client.call(session, "slow")
            assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_deadline")
            assert (await client.call(session, "greet", {"name": "you"})).outcome == "ok"
            await client.close(session)
    finally:
        samples.events.release.set()


async def test_hanging_calls_do_not_block_other_sessions_and_are_bounded(
    serve: Any, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl_tools.sessions.MAX_HANGING", 3)
    try:
        async with serve(tool("slow", "hang"), GREET, call_seconds=1.0) as client:
            for _ in range(3):
                session = await client.open()
                with pytest.raises(FailureError, match="longer than"):
                    await client.call(session, "slow")
                assert (await client.call(session, "greet", {"name": "you"})).outcome == "ok"
                await client.close(session)
            with pytest.raises(FailureError, match=r"3 calls have not returned \(tools: slow\)") as caught:
                await client.open()
            assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_hangs")
    finally:
        samples.events.release.set()


async def test_calls_to_one_tool_of_a_session_do_not_overlap_but_sessions_do(serve: Any, samples: Any) -> None:
    async with serve(tool("count", "one_at_a_time")) as client:
        session = await client.open()
        answers = await asyncio.gather(*(client.call(session, "count") for _ in range(5)))
        assert [answer.text for answer in answers] == ["1"] * 5
        sessions = [await client.open() for _ in range(2)]
        await asyncio.gather(*(client.call(each, "count") for each in sessions))


async def test_different_tools_of_a_session_run_at_once(serve: Any, samples: Any) -> None:
    async with serve(tool("slow", "hang"), GREET) as client:
        session = await client.open()
        slow = asyncio.create_task(client.call(session, "slow"))
        await asyncio.to_thread(samples.events.started.wait)
        assert (await client.call(session, "greet", {"name": "you"})).outcome == "ok"
        samples.events.release.set()
        assert (await slow).text == "late"


async def test_closing_ends_a_call_that_runs(serve: Any, samples: Any) -> None:
    async with serve(tool("slow", "hang_politely")) as client:
        session = await client.open()
        slow = asyncio.create_task(client.call(session, "slow"))
        await asyncio.to_thread(samples.events.started.wait)
        await client.close(session)
        with pytest.raises(FailureError) as caught:
            await slow
        assert (caught.value.code, caught.value.retryable) == ("unknown_session", True)


async def test_a_session_ends_with_its_lifetime(serve: Any, samples: Any) -> None:
    async with serve(NOTEBOOK, call_seconds=5) as client:
        session = await client.open(kwargs={"notebook": {"create_kwargs": {"owner": "ann"}}}, lifetime=0.05)
        assert await asyncio.to_thread(samples.events.any_closed.wait, 5)
        with pytest.raises(FailureError, match="expired"):
            await client.call(session, "notebook", {"note": "late"})
    assert samples.events.closed == ["ann"]


async def test_the_calls_that_open_a_session_share_its_tools(serve: Any, samples: Any) -> None:
    async with serve(tool("slowly", "MadeSlowly"), GREET, max_sessions=1) as client:
        opening, calls = client.opening(), [("slowly", {}), ("greet", {"name": "you"})]
        answers = [asyncio.create_task(client.call("mine", *said, opening=opening)) for said in calls]
        await asyncio.to_thread(samples.events.started.wait)
        samples.events.release.set()
        assert [(await answer).text for answer in answers] == ["ready", "hello you"]
        assert samples.events.made == 1
        await client.close("mine")
    assert samples.events.closed == ["slowly"]


async def test_a_cancelled_caller_leaves_the_session_to_the_others(serve: Any, samples: Any) -> None:
    async with serve(tool("slowly", "MadeSlowly")) as client:
        opening = client.opening()
        first, second = (asyncio.create_task(client.call("mine", "slowly", opening=opening)) for _ in range(2))
        await asyncio.to_thread(samples.events.started.wait)
        first.cancel()
        samples.events.release.set()
        assert (await second).text == "ready"
        assert samples.events.made == 1


@pytest.mark.parametrize("end", ["close", "stop"])
async def test_a_session_that_ends_while_tools_are_created_closes_them(serve: Any, samples: Any, end: str) -> None:
    async with serve(NOTEBOOK, tool("slowly", "MadeSlowly"), max_sessions=1) as client:
        opening = client.opening(kwargs={"notebook": {"create_kwargs": {"owner": "ann"}}})
        call = asyncio.create_task(client.call("mine", "notebook", {"note": "one"}, opening=opening))
        await asyncio.to_thread(samples.events.started.wait)
        try:
            await (client.close("mine") if end == "close" else client.stop())
            with pytest.raises(FailureError, match="the session was closed") as caught:
                await call
            assert samples.events.closed == ["ann"]
        finally:
            samples.events.release.set()
        assert (caught.value.code, caught.value.retryable) == ("unknown_session", True)
        if end == "close":  # and there is room again
            await client.open("slowly")


@pytest.mark.parametrize("cls", ["MadeSlowly", "ClosedBadly"])
async def test_a_tool_that_is_created_after_a_cancellation_is_closed(
    serve: Any, samples: Any, cls: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tool("slowly", cls), call_seconds=0.05) as client:
        try:
            with pytest.raises(FailureError, match="slowly: making it took longer than"):
                await client.open()
            assert samples.events.closed == []
        finally:
            samples.events.release.set()
        assert await asyncio.to_thread(samples.events.any_closed.wait, 30)
        async with asyncio.timeout(30):
            # What it raises is logged a moment after.
            while cls == "ClosedBadly" and "disk gone" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.01)
    assert samples.events.closed == ["slowly"]
    assert ("disk gone" in caplog.text) == (cls == "ClosedBadly")


async def test_sessions_are_bounded(serve: Any) -> None:
    async with serve(GREET, max_sessions=2) as client:
        first, _ = await client.open(), await client.open()
        with pytest.raises(FailureError, match="all 2 sessions are in use") as caught:
            await client.open()
        assert (caught.value.code, caught.value.retryable) == ("too_many_sessions", True)
        await client.close(first)
        await client.open()


@pytest.mark.parametrize(
    ("tools", "kwargs", "code", "message"),
    [
        (["absent"], {}, "unknown_tool", r"the row names tools that the job does not have: absent \(it has: greet, "),
        ([], {"absent": {}}, "unknown_tool", "absent"),
        (
            ["greet"],
            {"greet": {"create_kwargs": {"a": 1}}},
            "tool_kwargs_invalid",
            "greet: the row's create_kwargs do not fit: it is a function",
        ),
        (["greet"], {"greet": {"execute_kwargs": {"a": 1}}}, "tool_kwargs_invalid", "it has no parameter a"),
        (
            ["notebook"],
            {},
            "tool_kwargs_invalid",
            "create_kwargs do not fit: Notebook: missing a required argument: 'owner'",
        ),
        (["notebook"], {"notebook": {"create_kwargs": {"own": 1}}}, "tool_kwargs_invalid", "Notebook"),
        (["finish"], {}, "tool_kwargs_invalid", "expected is hidden from the model and must be set"),
        (["refuses"], {}, "tool_raised", "refuses: ConnectionError: no database"),
        ([], {"greet": 5}, "tool_kwargs_invalid", "must be an object that maps tool names to"),
        ([], {"greet": {"create": {}}}, "tool_kwargs_invalid", "must be an object that maps tool names to"),
    ],
)
async def test_a_row_that_does_not_fit_the_tools_fails_the_episode_at_once(
    serve: Any, tools: list[str], kwargs: dict[str, Any], code: str, message: str
) -> None:
    async with serve(GREET, NOTEBOOK, tool("finish", "Finish"), tool("refuses", "Refuses")) as client:
        with pytest.raises(FailureError, match=f"episode-1: .*{message}") as caught:
            await client.open(*tools, kwargs=kwargs)
        assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, code)


async def test_a_session_that_could_not_be_opened_leaves_nothing_behind(serve: Any, samples: Any) -> None:
    async with serve(NOTEBOOK, tool("refuses", "Refuses"), max_sessions=1) as client:
        for _ in range(2):
            with pytest.raises(FailureError, match="no database"):
                await client.open(kwargs={"notebook": {"create_kwargs": {"owner": "ann"}}})
        assert samples.events.closed == ["ann", "ann"]


@pytest.mark.parametrize("lifetime", [0, -1, float("inf"), float("nan")])
async def test_a_lifetime_is_a_number_of_seconds(serve: Any, lifetime: float) -> None:
    async with serve(GREET) as client:
        with pytest.raises(FailureError, match="lifetime"):
            await client.open(lifetime=lifetime)


async def test_a_session_needs_an_id_of_its_own(serve: Any) -> None:
    async with serve(GREET) as client:
        with pytest.raises(FailureError, match="episode-1: session_id: is empty") as caught:
            await client.call("", "greet", {"name": "you"}, opening=client.opening())
        assert (caught.value.code, caught.value.retryable) == ("invalid_request", False)


async def test_a_tool_that_cannot_be_closed_is_logged_and_counted(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(tool("bad", "BadCloser")) as client:
        session = await client.open()
        await client.close(session)
    assert any("tool bad could not be closed" in record.message for record in caplog.records)
    assert any("1 tools could not be closed" in record.message for record in caplog.records)


async def test_draining_closes_what_is_open(serve: Any, samples: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve(NOTEBOOK) as client:
        for owner in ("ann", "bob"):
            await client.open(kwargs={"notebook": {"create_kwargs": {"owner": owner}}})
        await client.stop()
    assert sorted(samples.events.closed) == ["ann", "bob"]
    assert "draining: closing 2 sessions" in caplog.text


VERL_SCHEMA = {
    "type": "function",
    "function": {
        "name": "theirs",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    },
}


@pytest.mark.parametrize("create", [{"start": 10}, {"begin": 10}])
async def test_a_class_written_for_verl_keeps_its_state_for_the_session(
    serve: Any, samples: Any, create: dict[str, int]
) -> None:
    entry = tool("count", "VerlCounter", config={"label": "at"}, tool_schema=VERL_SCHEMA)
    async with serve(entry) as client:
        listed = (await client.list())[0]
        assert (listed.name, listed.description) == ("count", "Counts.")
        session = await client.open(kwargs={"count": {"create_kwargs": create, "execute_kwargs": {"factor": 2}}})
        assert (await client.call(session, "count", {"by": 1})).text == "at 12"
        answer = await client.call(session, "count", {"by": 2})
        assert (await client.call(session, "count", {"by": "2"})).outcome == "schema_violation"
        await client.close(session)
    assert answer.text == "at 16"
    assert json.loads(answer.data_json) == {"tool_reward": 0.5, "tool_metrics": {"calls": 1}}
    assert samples.events.closed == ["instance-0"]


@pytest.mark.parametrize(
    "raw",
    [
        '{"name": ' + "[" * 500 + "]" * 500 + "}",
        '{"name": ' + "[" * 100_000,
        '{"name": "\\ud800"}',
        '{"name": ' + "9" * 1_000_000 + "}",
        '{"name": "' + "x" * 2_000_000 + '"}',
    ],
    ids=["deep", "deeper", "surrogate", "digits", "2 MB"],
)
async def test_arguments_that_no_model_may_send_are_a_violation_and_no_failure(serve: Any, raw: str) -> None:
    async with serve(ToolEntry(name="greet", use="tool_samples:greet")) as client:
        session = await client.open("greet")
        assert (await client.call(session, "greet", raw=raw)).outcome == "schema_violation"
        assert (await client.call(session, "greet", {"name": "a"})).outcome == "ok"
