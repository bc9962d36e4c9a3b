"""What a learner tells who watches it: engines, checkpoints, the pace, and how often."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import obstore
import pytest

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.api.learner.v1 import learner_pb2 as lpb
from kestrl.api.learner.v1 import learner_pb2_grpc as lstubs
from kestrl.errors import Boundary, EngineFailure, Failure, PlaceError
from kestrl.rpc.codec import policy_from_proto
from kestrl.storage import ObjectStore, open_store, read_manifest
from kestrl_learner import checkpoint
from kestrl_learner.__main__ import work
from kestrl_learner.progress import LearnerServicer, Progress
from kestrl_learner.run import Run

from .fakes import FakeAgent, Watcher, served, watched

pytestmark = pytest.mark.usefixtures("quick")


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
        (starts, "starting", ""),
        (loads_for_long, "loading", ""),
        (lies, "quarantined", "[engine/probe_mismatch] the probe differs by 3"),
    ],
)
async def test_an_engine_that_has_not_proved_the_newest_version_is_told_with_its_reason(
    staged: Any, happens: Any, state: str, message: str
) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        happens(stage.agents[1])
        async with learning(stage.settings) as watcher:
            report = await watcher.told(lambda told: told.groups_running == 2)
            first, second = report.engines
            assert (first.name, first.state, first.lag, first.policy.step) == ("engine-0", "serving", 0, 0)
            assert first.policy.sha256 == report.policy.sha256
            assert (second.name, second.state, second.lag) == ("engine-1", state, 1)
            assert second.message.startswith(message)
            assert not second.HasField("policy")
            assert (report.engines_converged, report.engines_total) == (1, 2)


@pytest.mark.parametrize(
    ("happens", "state", "message"),
    [(comes_back, "recovering", ""), (dies, "away", "[engine/engine_down] it stopped answering")],
)
async def test_an_engine_that_went_away_claims_nothing_until_it_has_proved_it_anew(
    staged: Any, happens: Any, state: str, message: str
) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        async with learning(stage.settings) as watcher:
            before = await watcher.told(lambda told: told.groups_running == 2)
            assert [engine.state for engine in before.engines] == ["serving", "serving"]
            assert [engine.message for engine in before.engines] == ["", ""]
            happens(stage.agents[1])
            engine = (await watcher.told(lambda told: told.engines[1].state == state)).engines[1]
            assert (engine.lag, engine.message, engine.HasField("policy")) == (1, message, False)
            stage.agents[1].state = ipb.ENGINE_STATE_READY
            await watcher.told(lambda told: told.engines[1].state == "serving" and told.engines_converged == 2)


async def test_an_agent_that_does_not_answer_any_more_is_away_and_one_that_never_did_starts(staged: Any) -> None:
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
            report = await watcher.told(lambda told: told.groups_running == 2)
            assert [engine.state for engine in report.engines] == ["serving", "starting"]
            assert "127.0.0.1:1" in report.engines[1].message
            broken = True
            report = await watcher.told(lambda told: told.engines[0].state == "away")
            assert report.engines[0].message == "[engine/agent_broken] no more"
            assert report.engines_converged == 0


async def test_lag_lineage_checkpoint_and_pace_are_told_as_training_goes_on(staged: Any) -> None:
    async with staged() as stage:
        stage.agents[1].fail = lambda policy: (
            EngineFailure("not this one", code="probe_mismatch", retryable=False) if policy.step else None
        )
        stage.workers[0].hangs = lambda request: request.purpose == "train" and request.policy.step == 2
        async with learning(stage.settings) as watcher:
            report = await watcher.told(lambda told: told.step == 2 and told.groups_running == 2)
            assert (report.phase, report.total_steps) == ("training", 6)
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
        before = [told for told in watcher.reports if told.step < 2]
        assert {told.checkpoint_step for told in before if told.HasField("checkpoint_step")} == {0}
        assert not watcher.reports[0].HasField("checkpoint_step")
        # A version that was just published is proved by nobody yet, whoever proved the one before.
        fresh = next(told for told in watcher.reports if told.policy.step == 1)
        assert (fresh.engines_converged, [engine.lag for engine in fresh.engines]) == (0, [1, 1])
        assert (watcher.last.phase, list(watcher.last.engines), watcher.last.workers) == ("suspended", [], 0)


async def test_groups_that_wait_and_workers_that_go_are_told(staged: Any) -> None:
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
            await watcher.told(lambda told: (told.groups_running, told.groups_ready, told.workers) == (1, 1, 2))
            stage.workers[1].draining = True
            await watcher.told(lambda told: told.workers == 1)
            held.set()


@pytest.mark.parametrize(("equal_until", "degenerate"), [(6, True), (5, False)])
async def test_steps_without_anything_to_learn_from_are_told(staged: Any, equal_until: int, degenerate: bool) -> None:
    async with staged() as stage:
        stage.workers[0].script = lambda request, group: (
            replace(group, episodes=[replace(episode, reward=1.0) for episode in group.episodes])
            if request.policy.step < equal_until
            else group
        )
        run = Run(stage.settings)
        await run.main()
        assert run.progress.message_now().degenerate == degenerate


async def test_a_resumed_run_tells_where_it_is_before_it_has_a_model_and_knows_its_versions_parent(staged: Any) -> None:
    async with staged() as stage:
        await Run(stage.but(max_steps=2)).main()
        stage.workers[0].draining = True  # so that it does not get on
        async with learning(stage.settings) as watcher:
            report = await watcher.told(lambda told: "engines start" in told.message)
            assert (report.phase, report.step, report.checkpoint_step) == ("starting", 2, 2)
        assert stage.summary["steps"] == 2
        stage.workers[0].draining = False
        stage.workers[0].gate = asyncio.Event()
        async with learning(stage.settings) as watcher:
            report = await watcher.told(lambda told: told.groups_running == 2)
            assert report.policy.step == 2
            assert report.policy_parent.startswith("test.1.")


async def test_a_checkpoint_that_cannot_be_read_back_counts_for_nothing_and_the_run_goes_on(
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
        run = Run(stage.but(checkpoint_every=1, keep_checkpoints=1, max_steps=4))
        seen: dict[int, lpb.WatchProgressResponse] = {}
        kept: dict[int, list[int]] = {}
        store = open_store(stage.settings.storage)

        def spoil(request: Any, group: Any) -> Any:
            nonlocal spoilt
            if request.purpose == "train":
                step = request.policy.step
                spoilt = step == 1  # while the checkpoint of step 2 is written
                seen[step] = run.progress.message_now()
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


async def test_what_storage_refuses_is_told(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put

    def full(store: Any, path: str, content: Any, **options: Any) -> Any:
        if path.startswith("metrics/000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", full)
    async with staged() as stage:
        run = Run(stage.settings)
        with pytest.raises(PlaceError):
            await run.main()
        told = run.progress.message_now()
        assert told.phase == "failed"
        assert "no space left" in told.storage_failure
        assert told.checkpoint_step == 0


@asynccontextmanager
async def telling(progress: Progress) -> AsyncGenerator[str]:
    servicer = LearnerServicer(progress, lambda: None)
    async with served(
        "learner", lambda server: lstubs.add_LearnerServiceServicer_to_server(servicer, server)
    ) as address:
        yield address
        progress.end()


async def test_changes_are_told_no_more_often_than_asked_for_and_the_last_state_always() -> None:
    progress = Progress(100, 1, 1)
    async with telling(progress) as address, watched(address, min_interval=0.3) as watcher:
        loop = asyncio.get_running_loop()
        await watcher.told(lambda told: told.step == 0)
        began = loop.time()
        for step in range(1, 21):
            progress.update(step=step)
            await asyncio.sleep(0.005)
        await watcher.told(lambda told: told.step == 20)
        assert loop.time() - began > 0.2
        assert len(watcher.reports) <= 3


async def test_the_end_is_told_at_once() -> None:
    progress = Progress(100, 1, 1)
    async with telling(progress) as address, watched(address, min_interval=600.0) as watcher:
        await watcher.told(lambda told: told.phase == "starting")
        progress.update(step=7)
        progress.update(phase="failed", message="why")
        report = await watcher.told(lambda told: told.phase == "failed")
        assert (report.step, report.message) == (7, "why")
        assert not watcher.ended
        progress.end()
        async with asyncio.timeout(5):
            while not watcher.ended:  # noqa: ASYNC110 - the stream's end has no event
                await asyncio.sleep(0.01)


async def test_a_change_while_the_last_one_is_told_is_not_lost_and_what_did_not_change_is_not_told() -> None:
    progress = Progress(100, 1, 1)
    reports = LearnerServicer(progress, lambda: None).WatchProgress(lpb.WatchProgressRequest(), None)
    assert (await anext(reports)).step == 0
    progress.update(step=1)  # the stream is still busy with the report before
    async with asyncio.timeout(5):
        assert (await anext(reports)).step == 1
    progress.update()
    progress.update(phase="succeeded", tokens_per_second=float("nan"))
    progress.end()
    async with asyncio.timeout(5):
        assert [report.phase async for report in reports] == ["succeeded"]
