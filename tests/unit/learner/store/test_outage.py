"""A storage that goes away while a learner runs: waited for by time, reported meanwhile, and never in the way of a
stop."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from tests.fakes.ports import free_port
from tests.fakes.s3 import S3Server
from tests.unit.learner.fakes import running, until, watched

from kestrl._shared.backoff import Backoff
from kestrl.errors import PlaceError, StorageError, StorageUnavailable
from kestrl.storage import open_store
from kestrl_learner import run
from kestrl_learner.ledger import Superseded
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import checkpoint, runstore
from kestrl_learner.store.runstore import Patience, RunStore


class Reported:
    """What a store reports."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.waiting: list[str] = []

    def store(self, uri: str, patience: Patience) -> RunStore:
        return RunStore(uri, patience=patience, refused=self.refused.append, waiting=self.waiting.append)


@pytest.fixture
def reported() -> Reported:
    return Reported()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Exception]], None]:
    """Has the next writes fail, with one error each."""
    put = obstore.put

    def fail(errors: list[Exception]) -> None:
        def broken(*arguments: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop(0)
            return put(*arguments, **options)

        monkeypatch.setattr(obstore, "put", broken)

    monkeypatch.setattr(runstore, "BACKOFF", Backoff(0.01, 5))
    return fail


STALE = GenericError("Generic LocalFileSystem error: Stale file handle (os error 116)")


def test_an_outage_is_waited_for_and_reported(tmp_path: Path, reported: Reported, failing: Any) -> None:
    store = reported.store(str(tmp_path), Patience(30))
    failing([STALE, STALE, STALE])
    store.put("a", b"1")
    assert store.get("a") == b"1"
    waiting, over = reported.waiting
    assert re.match(
        r"storage does not answer since [\d:]{8} and is asked again until [\d:]{8} UTC: cannot write", waiting
    )
    assert "Stale file handle" in waiting
    assert (over, reported.refused) == ("", [])


def test_an_outage_that_lasts_fails_typed_and_is_not_waited_for_again(
    tmp_path: Path, reported: Reported, failing: Any
) -> None:
    store = reported.store(str(tmp_path), Patience(0.3))
    failing([STALE] * 1000)
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(StorageUnavailable) as caught:
            store.put("a", b"1")
        assert (caught.value.code, caught.value.retryable) == ("storage_unavailable", True)
    assert 0.3 <= time.monotonic() - began < 20
    assert reported.waiting[-1] == ""
    assert "cannot write" in reported.refused[-1]


def test_what_answers_ends_the_outage_and_the_next_has_its_own_time(
    tmp_path: Path, reported: Reported, failing: Any
) -> None:
    store = reported.store(str(tmp_path), Patience(0.5))
    for _ in range(3):
        failing([STALE, FileNotFoundError(2, "No such file"), *[STALE] * 2])
        with pytest.raises(StorageError):
            store.put("a", b"1")
        store.put("a", b"1")
    assert reported.waiting[1::2] == [""] * 6


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        GenericError("Generic LocalFileSystem error: Unable to rename file: Is a directory (os error 21)"),
        ValueError("not of the store"),
    ],
)
def test_a_refusal_is_not_retried(tmp_path: Path, reported: Reported, failing: Any, error: Exception) -> None:
    left = [error]
    failing(left)
    with pytest.raises((PlaceError, StorageError, ValueError)):
        reported.store(str(tmp_path), Patience(30)).put("a", b"1")
    assert (left, reported.waiting) == ([], [])


def test_a_learner_that_is_replaced_while_it_waits_writes_nothing(
    tmp_path: Path, reported: Reported, failing: Any
) -> None:
    store = reported.store(str(tmp_path), Patience(30))
    answers: list[Exception | None] = [None, Superseded("another learner owns the run")]

    def fence() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    store.fence.follow(fence)
    failing([STALE])
    with pytest.raises(Superseded):
        store.put("a", b"1")
    assert not (tmp_path / "a").exists()


def test_a_learner_that_ends_stops_waiting(tmp_path: Path, reported: Reported, failing: Any) -> None:
    patience = Patience(60)
    store = reported.store(str(tmp_path), patience)
    failing([STALE] * 1000)
    threading.Timer(0.2, patience.hurry, [0.2]).start()
    began = time.monotonic()
    with pytest.raises(StorageUnavailable):
        store.put("a", b"1")
    assert 0.2 <= time.monotonic() - began < 30


SERVERS = pytest.mark.servers
RESTARTS = pytest.mark.timeout(240)
"""The four servers start once more, with up to a minute for their programs beside other tests."""


@SERVERS
@RESTARTS
@pytest.mark.parametrize(("place", "secret"), [("s3://nowhere/run", "testing"), ("s3://runs/run", "wrong")])
def test_a_missing_bucket_and_wrong_credentials_are_not_waited_for(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, reported: Reported, place: str, secret: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(PlaceError):
        reported.store(place, Patience(60)).put("a", b"1")
    assert reported.waiting == []
    assert len(reported.refused) == 1


@pytest.fixture
def away(s3_environment: S3Server) -> Any:
    """Stops the server, beside the loop; `back` starts it again."""

    class Away:
        async def go(self) -> None:
            await asyncio.to_thread(s3_environment.stop)

        async def back(self) -> None:
            await asyncio.to_thread(s3_environment.start)

    yield Away()
    s3_environment.start()


@SERVERS
@RESTARTS
async def test_a_run_outlives_an_outage_of_its_storage(staged: Any, away: Any) -> None:
    async with staged(storage=f"s3://runs/{uuid.uuid4().hex}") as stage, running(stage.settings) as (learner, _):
        stage.workers[0].gate = asyncio.Event()
        progress = learner.progress
        await until(lambda: progress.state.gauges.groups_running == 2)
        await away.go()
        stage.workers[0].gate.set()
        await until(lambda: progress.state.storage.wait, 20)
        assert "Connection refused" in progress.state.storage.wait
        assert progress.state.activity.phase == "training"
        await away.back()
        await until(lambda: not progress.state.storage.wait, 30)
        await until(lambda: progress.final, 30)
        assert (progress.state.activity.phase, progress.state.steps.done, progress.state.storage.failure) == (
            "succeeded",
            6,
            "",
        )


@SERVERS
@RESTARTS
async def test_a_drain_in_an_outage_ends_in_time_and_the_run_resumes(
    staged: Any, away: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "DRAIN_SECONDS", 0.5)
    storage = f"s3://runs/{uuid.uuid4().hex}"
    async with staged(storage=storage) as stage:
        stage.workers[0].gate = asyncio.Event()
        learner = LearnerRun(stage.settings)
        task = asyncio.create_task(learner.main())
        await until(lambda: learner.progress.state.gauges.groups_running == 2)
        await away.go()
        stage.workers[0].gate.set()
        await until(lambda: learner.progress.state.storage.wait, 20)
        learner.drain()
        async with asyncio.timeout(20):
            with pytest.raises(StorageUnavailable):
                await task
        assert (learner.progress.state.activity.phase, learner.progress.state.storage.wait) == ("failed", "")
        assert learner.progress.state.activity.failure is not None
        assert learner.progress.state.activity.failure.code == "storage_unavailable"
        await away.back()
        await LearnerRun(stage.settings).main()
        assert checkpoint.steps(open_store(storage))[-1] == 6


@SERVERS
@RESTARTS
async def test_a_learner_that_waits_at_its_start_ends_at_sigterm(staged: Any, away: Any, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with staged(storage=f"s3://runs/{uuid.uuid4().hex}", listen=address) as stage:
        await away.go()
        path = tmp_path / "settings.json"
        path.write_text(stage.settings.model_dump_json())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kestrl_learner", "--settings", str(path), stderr=subprocess.DEVNULL
        )
        try:
            async with watched(address, seconds=120) as watcher:
                await watcher.reported(lambda report: report.storage_wait)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(10):
                    assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
