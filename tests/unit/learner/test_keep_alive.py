"""A learner that is kept alive: it reports how its run ended until it is stopped, and does not repeat a succeeded
run."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import obstore
import pytest
from grpc_health.v1 import health_pb2
from obstore.exceptions import PermissionDeniedError
from tests.fakes.ports import free_port
from tests.unit.learner.fakes import Watcher, until, watched

from kestrl._shared import rpc
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.rpc.codec import run_phase_from_proto
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode.codec import failure_from_proto
from kestrl.errors import Boundary, EngineFailure, Failure, KestrlError, PlaceError, UserInputError
from kestrl_learner.__main__ import work
from kestrl_learner.model import adapters
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import data_sets

pytestmark = pytest.mark.usefixtures("quick")
health_grpc: Any = import_module("grpc_health.v1.health_pb2_grpc")


async def healthy(address: str) -> bool:
    async with rpc.channel(address) as connection:
        answer = await health_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def kept_alive(settings: Any) -> AsyncGenerator[Watcher]:
    """A learner that is kept alive, watched; it is stopped at the end while the stream is open, and must end at
    once."""
    settings = settings.model_copy(update={"keep_alive": True})
    serving = asyncio.create_task(work(settings))
    try:
        async with watched(settings.listen) as watcher:
            yield watcher
            assert not serving.done()
            began = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(20):
                await serving
            await until(lambda: watcher.ended)
            assert time.monotonic() - began < 9
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def still_reports(watcher: Watcher, address: str, phase: str) -> None:
    """A new client reads the end of the run, open streams stay open, and a drain changes nothing."""
    await watcher.drain()
    assert not watcher.ended
    assert await healthy(address)
    async with watched(address) as other:
        report = await other.reported(lambda _: True)
        assert report == watcher.last
        assert run_phase_from_proto(report.phase) == phase


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[PolicyModel]]:
    """Every model that a run loaded."""
    refs: list[weakref.ref[PolicyModel]] = []

    class Seen(PolicyModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            refs.append(weakref.ref(self))

    monkeypatch.setattr(adapters, "PolicyModel", Seen)
    return refs


async def test_a_succeeded_run_is_reported_until_stopped_and_its_model_freed(
    staged: Any, made: list[weakref.ref[PolicyModel]]
) -> None:
    async with staged() as stage, kept_alive(stage.but(max_steps=2)) as watcher:
        report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
        assert (report.step, report.total_steps, report.checkpoint_step, report.policy.step) == (2, 2, 2, 2)
        await still_reports(watcher, stage.settings.listen, "succeeded")
        await until(lambda: [ref() for ref in made] == [None])
        assert stage.summary["status"] == "succeeded"


async def test_a_failed_run_is_reported_until_stopped_and_its_model_freed(
    staged: Any, made: list[weakref.ref[PolicyModel]]
) -> None:
    async with staged() as stage:
        for agent in stage.agents:
            agent.fail = lambda _: EngineFailure("the probe differs", code="probe_mismatch", retryable=False)
        async with kept_alive(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_FAILED)
            failure = failure_from_proto(report.failure)
            assert (failure.boundary, failure.code) == (Boundary.ENGINE, "no_engine_proved")
            assert "the probe differs" in report.message
            await until(lambda: (stage.folder / "store" / "summary.json").exists())
            assert stage.summary["status"] == "failed"
            await still_reports(watcher, stage.settings.listen, "failed")
            await until(lambda: [ref() for ref in made] == [None])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": DataSettings(path="/nowhere/train.jsonl")}, "/nowhere/train.jsonl: cannot be read"),
        ({"storage": "ftp://nowhere/at/all"}, "storage.uri: 'ftp://nowhere/at/all' cannot be opened"),
        ({"model": "/nowhere/at/all"}, "spec.model.base"),
    ],
)
async def test_a_run_that_cannot_begin_is_reported(staged: Any, changes: dict[str, Any], expected: str) -> None:
    async with staged() as stage, kept_alive(stage.but(**changes)) as watcher:
        report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_FAILED)
        assert expected in report.failure.message
        assert report.failure.code == "invalid_input"
        await still_reports(watcher, stage.settings.listen, "failed")


async def test_storage_that_refuses_from_the_start_is_reported(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionDeniedError("the key is wrong")

    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1)).main()
        monkeypatch.setattr(obstore, "get", denied)
        before = looks(stage)
        async with kept_alive(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_FAILED)
            assert report.failure.code == "place_unusable", "of a folder"
            assert "access is denied" in report.storage_failure
            assert not report.HasField("checkpoint_step")
        assert looks(stage) == before


async def test_workers_that_go_while_it_evaluates_are_a_failure_like_any_other(staged: Any) -> None:
    async with staged() as stage:

        def go(request: Any, group: Any) -> Any:
            stage.workers[0].draining = True
            return KestrlError("gone", code="unavailable", retryable=True)

        stage.workers[0].script = go
        async with kept_alive(stage.but(start_seconds=3.0)) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_FAILED)
            assert report.failure.code == "no_worker"


async def test_a_drained_run_is_reported_as_suspended_until_stopped(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        async with kept_alive(stage.settings) as watcher:
            await watcher.reported(lambda report: report.groups_running == 2)
            await watcher.drain()
            await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUSPENDED)
            await still_reports(watcher, stage.settings.listen, "suspended")
            assert stage.summary["status"] == "suspended"


async def test_a_stop_during_training_drains_and_ends_the_program(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        async with kept_alive(stage.settings) as watcher:
            await watcher.reported(lambda report: report.groups_running == 2)
        assert watcher.last.phase == pb.RUN_PHASE_SUSPENDED
        assert stage.summary["status"] == "suspended"


async def test_a_run_that_fails_while_it_drains_to_go_fails_the_program(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put

    def full(store: Any, path: str, content: Any, **options: Any) -> Any:
        if path.startswith("checkpoints/") and stage.asked():
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", full)
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        with pytest.raises(PlaceError):  # noqa: PT012 - the failure comes at the end of the block
            async with kept_alive(stage.settings) as watcher:
                await watcher.reported(lambda report: report.groups_running == 2)
                await until(stage.asked)  # a worker answers a moment after the group counts as running
        assert stage.summary["status"] == "failed"


async def test_without_keep_alive_a_run_that_cannot_begin_ends_the_program(staged: Any) -> None:
    async with staged() as stage:
        with pytest.raises(UserInputError, match="/nowhere"):
            await work(stage.but(data=DataSettings(path="/nowhere/train.jsonl")))


async def test_while_data_is_read_it_says_that_it_starts(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, go_on = data_sets.load_scenarios, threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        assert go_on.wait(20)
        return read(*args, **options)

    monkeypatch.setattr(data_sets, "load_scenarios", slow)
    async with staged() as stage:
        try:
            async with kept_alive(stage.but(max_steps=1)) as watcher:
                report = await watcher.reported(lambda report: report.message)
                assert (report.phase, report.message, report.total_steps) == (
                    pb.RUN_PHASE_STARTING,
                    "reading the data",
                    0,
                )
                go_on.set()
                report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
                assert report.total_steps == 1
        finally:
            go_on.set()


def looks(stage: Any) -> tuple[int, int]:
    """How often engines and workers were asked for anything of weight."""
    return sum(agent.looks for agent in stage.agents), sum(len(worker.requests) for worker in stage.workers)


async def test_a_run_that_has_succeeded_is_reported_and_not_repeated(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.settings).main()
        before, summary = looks(stage), stage.summary
        async with kept_alive(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
            assert (report.step, report.total_steps, report.checkpoint_step) == (6, 6, 6)
            assert (report.policy.step, report.policy.sha256) == (6, summary["policy"]["sha256"])
            assert report.policy_uri == summary["policy"]["uri"]
            assert report.policy_parent.startswith("test.5.")
            assert f"reward {summary['after']['reward']:.3f}" in report.message
            await still_reports(watcher, stage.settings.listen, "succeeded")
        assert looks(stage) == before
        assert stage.summary == summary
        phases = [report.phase for report in watcher.reports]
        assert phases == [pb.RUN_PHASE_STARTING] * (len(phases) - 1) + [pb.RUN_PHASE_SUCCEEDED]


async def test_a_run_that_succeeded_with_dropped_scenarios_has_succeeded(staged: Any) -> None:
    async with staged() as stage:
        failure = Failure(boundary=Boundary.TOOL, code="tool_raised", message="a bug")
        stage.workers[0].script = lambda request, group: (
            replace(group, episodes=[replace(episode, failure=failure, reward=None) for episode in group.episodes])
            if request.purpose == "train" and request.scenario.ordinal == 3
            else group
        )
        await LearnerRun(stage.settings).main()
        assert (stage.summary["steps"], stage.summary["total_steps"]) == (5, 6)
        before = looks(stage)
        async with kept_alive(stage.settings) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
            assert (report.step, report.checkpoint_step, dict(report.failures)) == (5, 5, {"tool/tool_raised": 6})
        assert looks(stage) == before


async def test_a_longer_schedule_goes_on_from_a_run_that_has_succeeded(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        async with kept_alive(stage.but(max_steps=4)) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
            assert report.step == 4


async def test_a_run_that_has_succeeded_under_another_algorithm_is_not_this_one(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        async with kept_alive(stage.but(max_steps=2, algorithm={"learning_rate": 0.5})) as watcher:
            report = await watcher.reported(
                lambda report: report.phase in {pb.RUN_PHASE_FAILED, pb.RUN_PHASE_SUCCEEDED}
            )
            assert "was trained with another model, algorithm or data" in report.message


async def test_a_run_whose_adapter_is_gone_has_not_ended(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        (adapter,) = (stage.folder / "store" / "adapters").glob("000002-*")
        (adapter / "manifest.json").unlink()
        async with kept_alive(stage.but(max_steps=2)) as watcher:
            report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_SUCCEEDED)
            assert report.policy.step == 2
        assert (adapter / "manifest.json").exists()


async def test_without_keep_alive_a_succeeded_run_is_evaluated_again(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        before = looks(stage)
        await LearnerRun(stage.but(max_steps=2)).main()
        assert looks(stage) > before


async def test_a_process_answers_after_a_failed_run_and_exits_0_when_stopped(staged: Any, tmp_path: Path) -> None:
    async with staged() as stage:
        address = f"127.0.0.1:{free_port()}"
        settings = stage.but(keep_alive=True, listen=address, data=DataSettings(path="/nowhere/train.jsonl"))
        path = tmp_path / "settings.json"
        path.write_text(settings.model_dump_json())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kestrl_learner", "--settings", str(path), stderr=subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            said = b""
            async with asyncio.timeout(50):
                while b"the run has failed" not in said:
                    line = await process.stderr.readline()
                    assert line, said.decode()
                    said += line
            async with watched(address) as watcher:
                report = await watcher.reported(lambda report: report.phase == pb.RUN_PHASE_FAILED)
                assert "/nowhere/train.jsonl" in report.failure.message
                assert await healthy(address)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(9.5):
                    assert await process.wait() == 0
                await until(lambda: watcher.ended)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
