"""What the agent says of its engine: what it saw, and what it did about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kestrl.api.inference.v1 import inference_pb2
from kestrl.errors import EngineFailure, FailureError
from kestrl_inference.engine import IdleSeconds, Pulse
from kestrl_inference.servicer import patience
from kestrl_inference.watch import came_back


class Waited(asyncio.Event):
    """An event that reports when it is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = asyncio.Event()

    async def wait(self) -> Any:
        self.waited.set()
        return await super().wait()


def pulse(*adapters: str, born: float = 5.0, healthy: bool = True) -> Pulse:
    return Pulse(healthy=healthy, born=born, adapters=frozenset(adapters))


@pytest.mark.parametrize(
    ("before", "now", "back"),
    [
        (pulse(), pulse(), False),
        (pulse("a"), pulse("a"), False),
        (pulse("a"), pulse("a", "b"), False),
        (pulse("a", "b"), pulse("a"), False),
        (pulse(healthy=False), pulse("a"), True),
        (pulse("a", born=5.0), pulse("a", born=6.0), True),
        (pulse("a", born=0.0), pulse("a", born=0.0), False),
        (pulse("a"), pulse(), True),
        (pulse("a"), pulse("b"), True),
    ],
    ids=[
        "nothing happened", "nothing happened, one loaded", "one more", "one that is not wanted is gone", "was down",
        "restarted", "unknown start", "the wanted one is gone", "another instead",
    ],
)  # fmt: skip
def test_a_restarted_engine_is_detected(before: Pulse, now: Pulse, back: bool) -> None:
    assert came_back(before, now, frozenset({"a"}) & before.adapters) is back


async def test_an_engine_is_starting_until_it_is_seen(make_stage: Any) -> None:
    stage = await make_stage()
    assert await stage.state() == "STARTING"
    stage.engine.healthy = False
    await stage.look()
    assert await stage.state() == "STARTING"
    assert not (await stage.seen()).HasField("failure"), "starting is nothing wrong"
    stage.engine.healthy = True
    await stage.look()
    seen = await stage.seen()
    assert await stage.state() == "READY"
    assert (seen.name, seen.url, seen.restarts) == ("engine-0", stage.engine.url, 0)


async def test_loading_waits_for_an_engine_that_is_starting(make_stage: Any) -> None:
    stage = await make_stage()
    stage.watch.up = Waited()
    load = asyncio.create_task(stage.load(stage.publish(1)))
    await stage.watch.up.waited.wait()
    assert stage.engine.calls == []
    await stage.look()
    await load
    assert await stage.proved() == {1: True}


async def test_a_caller_gets_the_reason_within_its_deadline(make_stage: Any) -> None:
    stage = await make_stage(load_seconds=60)
    stage.engine.healthy = False
    await stage.look()
    with pytest.raises(FailureError) as caught:
        await stage.load(stage.publish(1), timeout=0.4)
    assert (caught.value.boundary, caught.value.code) == ("engine", "deadline_exceeded")
    assert "503" in str(caught.value)


@pytest.mark.parametrize(
    ("remaining", "seconds"), [(None, 60.0), (600.0, 599.0), (1.0, 0.5)], ids=["no deadline", "long", "short"]
)
def test_the_callers_deadline_is_the_patience(remaining: float | None, seconds: float) -> None:
    assert patience(remaining, 60.0) == seconds


async def test_an_engine_that_died_is_down_and_proves_nothing(stage: Any) -> None:
    await stage.load(stage.publish(1))
    await stage.engine.stop()
    await stage.look()
    seen = await stage.seen()
    assert await stage.state() == "DOWN"
    assert seen.failure.code == "engine_down"
    assert "stopped answering" in seen.failure.message
    assert await stage.proved() == {1: False}
    assert seen.policies[0].failure.code == "engine_down"


async def test_a_look_reports_at_once_that_the_engine_died(stage: Any) -> None:
    await stage.load(stage.publish(1))
    await stage.look()
    assert (await stage.seen(look=True)).state == inference_pb2.ENGINE_STATE_READY
    await stage.engine.stop()
    assert (await stage.seen()).state == inference_pb2.ENGINE_STATE_READY, "as of the agent's last look"
    seen = await stage.seen(look=True)
    assert (seen.state, seen.failure.code) == (inference_pb2.ENGINE_STATE_DOWN, "engine_down")
    assert await stage.proved() == {1: False}


async def test_a_restarted_engine_gets_its_versions_back_from_the_local_copies(stage: Any) -> None:
    one, two = stage.publish(1), stage.publish(2)
    await stage.load(one)
    await stage.load(two)
    for version in (one, two):  # storage may be far away, or gone
        (version.folder / "manifest.json").unlink()
    await stage.engine.stop()
    await stage.look()
    await stage.engine.start()
    stage.engine.calls.clear()
    await stage.look()
    assert sorted(stage.engine.calls) == sorted([f"load {one.name}", f"load {two.name}"])
    assert await stage.proved() == {1: True, 2: True}
    assert await stage.state() == "READY"
    assert (await stage.seen()).restarts == 1


async def test_a_restart_between_two_looks_is_seen_by_the_missing_versions(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    await stage.look()
    await stage.engine.stop()
    await stage.engine.start()
    await stage.look()
    assert (await stage.seen()).restarts == 1
    assert await stage.proved() == {1: True}


async def test_a_restarted_engine_that_serves_it_wrongly_has_not_proved_it(stage: Any) -> None:
    one, two = stage.publish(1), stage.publish(2)
    await stage.load(one)
    await stage.load(two)
    await stage.engine.stop()
    stage.engine.unapplied.add(one.name)
    await stage.look()
    await stage.engine.start()
    await stage.look()
    assert await stage.proved() == {2: True}
    assert list(stage.engine.adapters) == [two.name]


async def test_recovery_continues_at_the_next_look(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    stage.engine.adapters.clear()
    answered = stage.loaded.engine.score
    failures = ["once"]

    async def score(model: str, ids: Any) -> list[float]:
        if failures:
            failures.pop()
            raise EngineFailure("no answer", code="engine_deadline")
        return await answered(model, ids)

    stage.loaded.engine.score = score
    await stage.look()
    assert await stage.state() == "RECOVERING"
    assert await stage.proved() == {1: False}
    assert (await stage.seen()).policies[0].failure.code == "engine_deadline"
    await stage.look()
    assert await stage.state() == "READY"
    assert await stage.proved() == {1: True}
    assert (await stage.seen()).restarts == 1


async def test_a_version_whose_proof_got_no_answer_is_proved_at_the_next_look(stage: Any) -> None:
    version = stage.publish(1)
    engine, served = stage.loaded.engine, stage.engine.port
    score = engine.score

    async def die(model: str, ids: Any) -> list[float]:
        await stage.engine.stop()
        return await score(model, ids)

    engine.score = die
    with pytest.raises(FailureError) as caught:
        await stage.load(version)
    assert caught.value.code == "engine_unreachable"
    engine.score = score
    await stage.engine.start()
    assert stage.engine.port == served
    await stage.look()
    assert await stage.proved() == {1: True}
    assert await stage.state() == "READY"


async def test_a_load_during_a_look_is_not_a_restart(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = stage.publish(1)
    look = stage.watch.engine.look

    async def slow_look() -> Pulse:
        seen = await look()  # without the version
        await stage.load(version)
        return seen

    monkeypatch.setattr(stage.watch.engine, "look", slow_look)
    await stage.look()
    assert (await stage.seen()).restarts == 0
    assert await stage.proved() == {1: True}
    assert stage.engine.scored == [version.name]


async def test_a_retirement_during_a_look_is_not_a_restart(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = stage.publish(1)
    await stage.load(version)
    look = stage.watch.engine.look

    async def look_late() -> Pulse:
        await stage.retire(version)
        return await look()

    monkeypatch.setattr(stage.watch.engine, "look", look_late)
    await stage.look()
    assert (await stage.seen()).restarts == 0
    assert await stage.state() == "READY"


async def test_a_proof_that_ends_as_the_engine_dies_does_not_count(stage: Any) -> None:
    await stage.load(stage.publish(1))
    await stage.engine.stop()
    await stage.look()
    stage.loaded.held[next(iter(stage.loaded.held))].proved = True
    assert await stage.proved() == {1: False}


async def test_an_engine_that_fails_while_it_is_cleared_is_retried(make_stage: Any) -> None:
    stage = await make_stage()
    stage.engine.adapters["old"] = str(stage.adapters / "old")
    stage.engine.control_key = "another"
    await stage.look()
    assert await stage.state() == "STARTING"
    stage.engine.control_key = "the control key"
    await stage.look()
    assert await stage.state() == "READY"


@pytest.mark.parametrize(
    ("header", "idle"),
    [
        ("3.500 8.000", IdleSeconds(3.5, 8.0)),
        ("0.000 0.000", IdleSeconds(0.0, 0.0)),
        (None, None),
        ("", None),
        ("3.5", None),
        ("9.0 8.0", None),
        ("-1.0 8.0", None),
        ("nan 8.0", None),
        ("1.0 inf", None),
    ],
)
async def test_idle_time_of_the_engine_is_passed_on_if_it_says_it(
    make_stage: Any, header: str | None, idle: IdleSeconds | None
) -> None:
    stage = await make_stage()
    stage.engine.health_headers = {} if header is None else {"x-kestrl-idle": header}
    await stage.look()
    assert stage.watch.idle == idle
    answer = await stage.seen()
    assert answer.HasField("idle") is (idle is not None)
    assert idle is None or (answer.idle.idle, answer.idle.observed) == idle


async def test_the_work_of_the_engine_is_passed_on_while_it_answers(make_stage: Any) -> None:
    stage = await make_stage()
    assert not (await stage.seen()).HasField("work"), "it has not been looked at"
    stage.engine.metrics = "vllm:prompt_tokens_total 9.0\nvllm:request_decode_time_seconds_sum 1.5\n"
    await stage.look()
    assert (await stage.seen()).work == inference_pb2.EngineWork(prompt_tokens=9, decode_seconds=1.5)
    stage.engine.healthy = False
    await stage.look()
    assert not (await stage.seen()).HasField("work"), "what an engine that is down did is not known"
