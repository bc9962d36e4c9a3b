"""The progress stream of a learner: engines, checkpoints, pace, and update interval."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import obstore
import pytest
from tests.unit.learner.fakes import FakeAgent, Watcher, served, watched

from kestrl._shared.rpc.run_report import report_of, state_of
from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.api.learner.v1 import learner_pb2 as lpb
from kestrl.api.learner.v1 import learner_pb2_grpc as lstubs
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import policy_from_proto, policy_to_proto
from kestrl.errors import Boundary, EngineFailure, Failure, PlaceError
from kestrl.runstate.events import (
    CheckpointFound,
    LearningObserved,
    PhaseEntered,
    StepFinished,
    StepsPlanned,
    StorageAwaited,
)
from kestrl.runstate.history import LastStep, StepCounts
from kestrl.runstate.state import (
    EngineBuild,
    EngineFleet,
    EngineReport,
    Learning,
    NewestPolicy,
    RunState,
    Steps,
)
from kestrl.runstate.states import RunPhase, ServingState
from kestrl.storage import ObjectStore, open_store, read_manifest
from kestrl_learner.__main__ import work
from kestrl_learner.progress.progress import Progress
from kestrl_learner.progress.watched import is_news, standing
from kestrl_learner.run import LearnerRun
from kestrl_learner.servicer import LearnerServicer
from kestrl_learner.store import checkpoint

pytestmark = pytest.mark.usefixtures("quick")


def planned() -> Progress:
    """The progress of a run of 100 steps with one engine."""
    progress = Progress(engines=1, episodes_per_step=1)
    progress.emit(StepsPlanned(total=100))
    return progress


def step_finished(step: int, pace: float) -> StepFinished:
    """A step with a number of tokens per second."""
    return StepFinished(
        step=step,
        counts=StepCounts(groups=1, idle_groups=0, tool_calls=0, gradient=1.0),
        took=LastStep(tokens_per_second=pace),
        message=f"step {step}",
    )


@asynccontextmanager
async def learning(settings: Any) -> AsyncGenerator[Watcher]:
    """A learner that works, watched; it drains at the end."""
    serving = asyncio.create_task(work(settings))
    try:
        async with watched(settings.listen) as watcher:
            yield watcher
            await watcher.drain()
            async with asyncio.timeout(20):
                await serving
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def starts(agent: FakeAgent) -> None:
    agent.state = ipb.ENGINE_STATE_STARTING


def loads_for_long(agent: FakeAgent) -> None:
    agent.gate = asyncio.Event()


def lies(agent: FakeAgent) -> None:
    agent.fail = lambda _: EngineFailure("the probe differs by 3", code="probe_mismatch", retryable=False)


def comes_back(agent: FakeAgent) -> None:
    agent.state = ipb.ENGINE_STATE_RECOVERING
    agent.held = {name: (policy, False) for name, (policy, _) in agent.held.items()}


def dies(agent: FakeAgent) -> None:
    agent.state = ipb.ENGINE_STATE_DOWN
    agent.held.clear()
    agent.failure = Failure(boundary=Boundary.ENGINE, code="engine_down", message="it stopped answering")


@pytest.mark.parametrize(
    ("happens", "state", "message"),
    [
        (starts, lpb.SERVING_STATE_STARTING, ""),
        (loads_for_long, lpb.SERVING_STATE_LOADING, ""),
        (lies, lpb.SERVING_STATE_QUARANTINED, "[engine/probe_mismatch] the probe differs by 3"),
    ],
)
async def test_an_engine_behind_the_newest_version_is_reported_with_its_reason(
    staged: Any, happens: Any, state: lpb.ServingState.ValueType, message: str
) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        happens(stage.agents[1])
        async with learning(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.groups_running == 2)
            first, second = report.engines
            assert (first.name, first.state, first.lag, first.policy.step) == (
                "engine-0",
                lpb.SERVING_STATE_SERVING,
                0,
                0,
            )
            assert first.policy.sha256 == report.policy.sha256
            assert (second.name, second.state, second.lag) == ("engine-1", state, 1)
            assert second.message.startswith(message)
            assert not second.HasField("policy")
            assert (report.engines_converged, report.engines_total) == (1, 2)


async def test_what_answers_and_what_names_its_policies_are_reported(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        stage.agents[1].build = ipb.EngineBuild(engine="sglang", version="0.5.23", witness="guard")
        async with learning(stage.settings) as watcher:
            report = await watcher.reported(lambda report: bool(state_of(report).engines.builds))
        engines = state_of(report).engines
        build = EngineBuild(engine="sglang", version="0.5.23", witness="guard")
        assert engines.builds == (build,)
        assert [engine.build for engine in engines.reports] == [None, build]


@pytest.mark.parametrize(
    ("happens", "state", "message"),
    [
        (comes_back, lpb.SERVING_STATE_RECOVERING, ""),
        (dies, lpb.SERVING_STATE_AWAY, "[engine/engine_down] it stopped answering"),
    ],
)
async def test_an_engine_that_went_away_claims_nothing_until_it_has_proved_it_anew(
    staged: Any, happens: Any, state: lpb.ServingState.ValueType, message: str
) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        async with learning(stage.settings) as watcher:
            before = await watcher.reported(lambda report: report.groups_running == 2)
            assert [engine.state for engine in before.engines] == [lpb.SERVING_STATE_SERVING] * 2
            assert [engine.message for engine in before.engines] == ["", ""]
            happens(stage.agents[1])
            engine = (await watcher.reported(lambda report: report.engines[1].state == state)).engines[1]
            assert (engine.lag, engine.message, engine.HasField("policy")) == (1, message, False)
            stage.agents[1].state = ipb.ENGINE_STATE_READY
            await watcher.reported(
                lambda report: report.engines[1].state == lpb.SERVING_STATE_SERVING and report.engines_converged == 2
            )


async def test_an_agent_that_stopped_answering_is_away_a_new_one_is_starting(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        nobody = stage.settings.engines[1].model_copy(update={"agent_address": "127.0.0.1:1"})
        broken = False
        answer = stage.agents[0].GetEngine

        async def silent(request: Any, context: Any) -> Any:
            if broken:
                raise EngineFailure("no more", code="agent_broken")
            return await answer(request, context)

        stage.agents[0].GetEngine = silent
        async with learning(stage.but(engines=(stage.settings.engines[0], nobody))) as watcher:
            report = await watcher.reported(lambda report: report.groups_running == 2)
            assert [engine.state for engine in report.engines] == [
                lpb.SERVING_STATE_SERVING,
                lpb.SERVING_STATE_STARTING,
            ]
            assert "127.0.0.1:1" in report.engines[1].message
            broken = True
            report = await watcher.reported(lambda report: report.engines[0].state == lpb.SERVING_STATE_AWAY)
            assert report.engines[0].message == "[engine/agent_broken] no more"
            assert report.engines_converged == 0


async def test_lag_parent_checkpoint_and_pace_are_reported_during_training(staged: Any) -> None:
    async with staged() as stage:
        stage.agents[1].fail = lambda policy: (
            EngineFailure("not this one", code="probe_mismatch", retryable=False) if policy.step else None
        )
        stage.workers[0].hangs = lambda request: request.purpose == "train" and request.policy.step == 2
        async with learning(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.step == 2 and report.groups_running == 2)
            assert (report.phase, report.total_steps) == (lpb.RUN_PHASE_TRAINING, 6)
            assert [(engine.policy.step, engine.lag) for engine in report.engines] == [(2, 0), (0, 2)]
            store = open_store(stage.settings.storage)
            manifest = read_manifest(open_store(report.policy_uri))
            assert manifest.policy == policy_from_proto(report.policy)
            assert report.policy_parent == manifest.parent
            assert report.policy_parent.startswith("test.1.")
            assert report.checkpoint_step == 2
            assert store.exists("checkpoints/000002/manifest.json")
            assert report.storage_failure == ""
            assert report.workers == 1
            assert report.groups_ready == 0
            assert report.episodes_per_second > 0
            assert not report.degenerate
        before = [report for report in watcher.reports if report.step < 2]
        assert {report.checkpoint_step for report in before if report.HasField("checkpoint_step")} == {0}
        assert not watcher.reports[0].HasField("checkpoint_step")
        # A version that was just published is not verified yet, whichever engines verified the one before.
        first_report = next(report for report in watcher.reports if report.policy.step == 1)
        assert (first_report.engines_converged, [engine.lag for engine in first_report.engines]) == (0, [1, 1])
        assert (watcher.last.phase, list(watcher.last.engines), watcher.last.workers) == (
            lpb.RUN_PHASE_SUSPENDED,
            [],
            0,
        )


async def test_ready_groups_and_departed_workers_are_reported(staged: Any) -> None:
    async with staged(workers=2) as stage:
        held = asyncio.Event()
        inner = stage.workers[0].RunGroup

        async def slow(request: Any, context: Any) -> Any:
            if request.purpose == "train":
                await held.wait()
            async for answer in inner(request, context):
                yield answer

        for worker in stage.workers:
            worker.concurrency = 3
        stage.workers[0].RunGroup = slow
        async with learning(stage.settings) as watcher:
            await watcher.reported(
                lambda report: (report.groups_running, report.groups_ready, report.workers) == (1, 1, 2)
            )
            stage.workers[1].draining = True
            await watcher.reported(lambda report: report.workers == 1)
            held.set()


@pytest.mark.parametrize(("equal_until", "degenerate"), [(6, True), (5, False)])
async def test_zero_advantage_steps_are_reported(staged: Any, equal_until: int, degenerate: bool) -> None:
    async with staged() as stage:
        stage.workers[0].script = lambda request, group: (
            replace(group, episodes=[replace(episode, reward=1.0) for episode in group.episodes])
            if request.policy.step < equal_until
            else group
        )
        run = LearnerRun(stage.settings)
        await run.main()
        assert report_of(run.progress.state).degenerate == degenerate


async def test_a_resumed_run_reports_its_step_before_loading_and_the_parent(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        stage.workers[0].draining = True  # so that it does not get on
        async with learning(stage.settings) as watcher:
            report = await watcher.reported(lambda report: "engines start" in report.message)
            assert (report.phase, report.step, report.checkpoint_step) == (lpb.RUN_PHASE_STARTING, 2, 2)
        assert stage.summary["steps"] == 2
        stage.workers[0].draining = False
        stage.workers[0].gate = asyncio.Event()
        async with learning(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.groups_running == 2)
            assert report.policy.step == 2
            assert report.policy_parent.startswith("test.1.")


async def test_an_unreadable_checkpoint_does_not_count_and_the_run_goes_on(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = False
    get = ObjectStore.get
    monkeypatch.setattr(
        ObjectStore,
        "get",
        lambda store, path: b"other" if spoilt and path.endswith(".pt") else get(store, path),
    )
    async with staged() as stage:
        run = LearnerRun(stage.but(checkpoint_every=1, keep_checkpoints=1, max_steps=4))
        seen: dict[int, lpb.WatchProgressResponse] = {}
        kept: dict[int, list[int]] = {}
        store = open_store(stage.settings.storage)

        def spoil(request: Any, group: Any) -> Any:
            nonlocal spoilt
            if request.purpose == "train":
                step = request.policy.step
                spoilt = step == 1  # while the checkpoint of step 2 is written
                seen[step] = report_of(run.progress.state)
                kept[step] = checkpoint.steps(store)
            return group

        stage.workers[0].script = spoil
        await run.main()
        assert (seen[1].checkpoint_step, seen[1].storage_failure) == (1, "")
        assert seen[2].checkpoint_step == 1
        assert "step 2 was written and cannot be read back" in seen[2].storage_failure
        assert "corrupt" in seen[2].storage_failure
        assert kept == {0: [0], 1: [1], 2: [1, 2], 3: [3]}  # the one before was not removed for it
        assert (seen[3].checkpoint_step, seen[3].storage_failure) == (3, "")
        assert stage.summary["status"] == "succeeded"


async def test_a_storage_failure_is_reported(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put

    def full(store: Any, path: str, content: Any, **options: Any) -> Any:
        if path.startswith("episodes/train/step=000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", full)
    async with staged() as stage:
        run = LearnerRun(stage.settings)
        with pytest.raises(PlaceError):
            await run.main()
        report = report_of(run.progress.state)
        assert report.phase == lpb.RUN_PHASE_FAILED
        assert "no space left" in report.storage_failure
        assert report.checkpoint_step == 0


@asynccontextmanager
async def telling(progress: Progress) -> AsyncGenerator[str]:
    servicer = LearnerServicer(progress, lambda: None)
    async with served(
        "learner", lambda server: lstubs.add_LearnerServiceServicer_to_server(servicer, server)
    ) as address:
        yield address
        progress.end()


async def test_changes_are_sent_at_the_requested_interval_and_the_last_always() -> None:
    progress = planned()
    loop = asyncio.get_running_loop()
    began, interval = loop.time(), 0.3
    async with telling(progress) as address, watched(address, min_interval=interval) as watcher:
        await watcher.reported(lambda report: report.step == 0)
        for step in range(1, 21):
            progress.emit(CheckpointFound(step=step))
            await asyncio.sleep(0.005)
        await watcher.reported(lambda report: report.step == 20)
        assert len(watcher.reports) <= 1 + (loop.time() - began) / interval


async def test_the_end_is_reported_at_once() -> None:
    progress = planned()
    async with telling(progress) as address, watched(address, min_interval=600.0) as watcher:
        await watcher.reported(lambda report: report.phase == lpb.RUN_PHASE_STARTING)
        progress.emit(CheckpointFound(step=7))
        progress.emit(PhaseEntered(phase=RunPhase.FAILED, message="why"))
        report = await watcher.reported(lambda report: report.phase == lpb.RUN_PHASE_FAILED)
        assert (report.step, report.message) == (7, "why")
        assert not watcher.ended
        progress.end()
        async with asyncio.timeout(20):
            while not watcher.ended:  # noqa: ASYNC110 - the stream's end has no event
                await asyncio.sleep(0.01)


async def test_a_change_during_a_send_is_not_lost_and_equal_states_are_not_sent() -> None:
    progress = planned()
    reports = LearnerServicer(progress, lambda: None).WatchProgress(lpb.WatchProgressRequest(), None)
    assert (await anext(reports)).step == 0
    progress.emit(CheckpointFound(step=1))  # the stream is still busy with the report before
    async with asyncio.timeout(20):
        assert (await anext(reports)).step == 1
    progress.emit(CheckpointFound(step=1))
    progress.emit(LearningObserved(learning=Learning(learned=True)))
    progress.emit(step_finished(1, float("nan")))
    progress.emit(PhaseEntered(phase=RunPhase.SUCCEEDED))
    progress.end()
    async with asyncio.timeout(20):
        assert [report.phase async for report in reports] == [lpb.RUN_PHASE_SUCCEEDED]


async def test_numbers_are_sent_at_their_own_interval_and_states_at_once() -> None:
    progress = planned()
    servicer = LearnerServicer(progress, lambda: None)
    request = lpb.WatchProgressRequest(min_interval_seconds=0.05, numbers_interval_seconds=600.0)
    reports = servicer.WatchProgress(request, None)
    assert (await anext(reports)).step == 0
    progress.emit(PhaseEntered(phase=RunPhase.TRAINING))
    progress.emit(step_finished(1, 1.0))
    assert (await anext(reports)).step == 1
    waits = asyncio.ensure_future(anext(reports))
    for step in range(2, 50):
        progress.emit(step_finished(step, float(step)))
        progress.observe(groups_running=step)
        await asyncio.sleep(0.005)
    assert not waits.done()
    progress.emit(StorageAwaited(reason="no answer since 21:03:10Z"))
    async with asyncio.timeout(5):
        report = await waits
    assert (report.step, report.storage_wait) == (49, "no answer since 21:03:10Z")
    waits = asyncio.ensure_future(anext(reports))
    progress.emit(CheckpointFound(step=50))
    progress.emit(PhaseEntered(phase=RunPhase.SUCCEEDED))
    async with asyncio.timeout(5):
        assert (await waits).step == 50


def test_what_goes_on_as_it_should_is_no_other_state() -> None:
    def report(step: int, **more: Any) -> lpb.WatchProgressResponse:
        policy = PolicyVersion(job="j", step=step, sha256="0" * 64)
        engine = lpb.EngineProgress(name="engine-0", policy=policy_to_proto(policy), lag=step % 2)
        facts = {"step": step, "means": {"reward": 0.1 * step}, "failures": {"tool/x": step}, "workers": 1 + step}
        return lpb.WatchProgressResponse(
            **{**facts, "policy": policy_to_proto(policy), "engines": [engine], "checkpoint_step": step, **more}
        )

    def state(step: int, **more: Any) -> RunState:
        return standing(state_of(report(step, **more)))

    assert state(1) == state(2)
    away = lpb.EngineProgress(name="engine-0", state=lpb.SERVING_STATE_AWAY)
    for change in (
        {"workers": 0}, {"failures": {"judge/late": 1}}, {"means": {}}, {"checkpoint_step": None}, {"degenerate": True},
        {"engines": [away]}, {"engines_total": 2}, {"tool_warning_reason": "no_tool_call"}, {"storage_wait": "since"},
    ):  # fmt: skip
        assert state(1, **change) != state(1), change


def test_loading_the_version_of_a_step_is_no_news_and_its_end_is_where_it_was_sent() -> None:
    def fleet(step: int, *states: str, message: str = "") -> RunState:
        newest, before = (PolicyVersion(job="j", step=each, sha256="0" * 64) for each in (step, step - 1))
        reports = tuple(
            EngineReport(name=f"engine-{index}", policy=newest, state=ServingState.SERVING)
            if state == "serving"
            else EngineReport(name=f"engine-{index}", policy=before, lag=1, state=ServingState(state), message=message)
            for index, state in enumerate(states)
        )
        verified = states.count("serving")
        fleet = EngineFleet(total=len(states), verified=verified, reports=reports)
        return RunState(steps=Steps(done=step), policy=NewestPolicy(version=newest), engines=fleet)

    served = fleet(3, "serving", "serving")
    for states in (("loading", "loading"), ("serving", "loading")):
        loads = fleet(4, *states)
        assert not is_news(served, loads)
        assert not is_news(loads, fleet(5, *states))
        assert is_news(loads, fleet(4, "serving", "serving")), "what was sent is not so any more"
    assert is_news(served, fleet(4, "serving", "away"))
    assert is_news(served, fleet(4, "serving", "quarantined"))
    assert is_news(served, fleet(4, "serving", "loading", message="no space left"))
