"""A storage that denies what it has allowed before: its credentials are being rotated, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.mounted_secret import MountedSecret
from tests.fakes.s3 import S3Server
from tests.unit.learner.fakes import running, until

from kestrl.errors import FailureError, StorageInaccessible
from kestrl.storage.credentials import FOLDER_VARIABLE
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.runstore import Patience, RunStore

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]
DENIED = StorageInaccessible("s3://runs/a: access is denied")


@pytest.fixture
def rotate(
    s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mapping[str, str]], None]:
    """Mounts a Secret with the credentials of storage, or changes it."""
    secret = MountedSecret(tmp_path / "mounted")
    for name in s3_environment.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv(FOLDER_VARIABLE, str(secret.folder))
    secret.write(s3_environment.environment())
    return secret.write


def test_a_denial_is_waited_for_once_the_store_has_worked(s3_environment: S3Server, rotate: Any) -> None:
    refused: list[str] = []
    waiting: list[str] = []

    def heal(why: str) -> None:
        waiting.append(why)
        rotate(s3_environment.environment())

    store = RunStore(f"s3://runs/{uuid.uuid4().hex}", patience=Patience(60), refused=refused.append, waiting=heal)
    store.put("a", b"1")
    rotate(s3_environment.environment(secret="revoked"))
    assert store.get("a") == b"1"
    assert "storage denies access since" in waiting[0]
    assert "SignatureDoesNotMatch" in waiting[0]
    assert (waiting[1], refused) == ("", [])


def test_a_denial_that_lasts_is_typed(s3_environment: S3Server, rotate: Any) -> None:
    waiting: list[str] = []
    refused: list[str] = []
    store = RunStore(
        f"s3://runs/{uuid.uuid4().hex}", patience=Patience(0.5), refused=refused.append, waiting=waiting.append
    )
    store.put("a", b"1")
    rotate(s3_environment.environment(secret="revoked"))
    with pytest.raises(StorageInaccessible):
        store.put("a", b"2")
    assert (waiting[-1], len(refused)) == ("", 1)


async def test_a_run_outlives_a_rotation_of_its_credential(staged: Any, s3_environment: S3Server, rotate: Any) -> None:
    async with staged(storage=f"s3://runs/{uuid.uuid4().hex}") as stage, running(stage.settings) as (learner, _):
        stage.workers[0].gate = asyncio.Event()
        progress = learner.progress
        await until(lambda: progress.state.gauges.groups_running == 2)
        rotate(s3_environment.environment(secret="revoked"))
        stage.workers[0].gate.set()
        await until(lambda: progress.state.storage.wait, 20)
        assert "access is denied" in progress.state.storage.wait
        assert progress.state.activity.phase == "training"
        rotate(s3_environment.environment())
        await until(lambda: not progress.state.storage.wait, 30)
        await until(lambda: progress.final, 30)
        assert (progress.state.activity.phase, progress.state.steps.done, progress.state.storage.failure) == (
            "succeeded",
            6,
            "",
        )


async def test_engines_that_are_denied_a_version_ask_again(staged: Any, quick: None) -> None:
    async with staged() as stage, running(stage.settings) as (learner, _):
        for agent in stage.agents:
            agent.fail = lambda policy: DENIED if policy.step else None
        await until(lambda: all(agent.loads > 3 for agent in stage.agents))
        assert learner.progress.state.activity.phase == "training"
        for agent in stage.agents:
            agent.fail = lambda _: None
        await until(lambda: learner.progress.final, 30)
        assert (learner.progress.state.activity.phase, learner.progress.state.steps.done) == ("succeeded", 6), (
            learner.progress.state.activity.failure
        )


async def test_engines_that_are_denied_for_long_fail_the_run_as_storage_does(staged: Any) -> None:
    async with staged() as stage:
        for agent in stage.agents:
            agent.fail = lambda _: DENIED
        with pytest.raises(FailureError, match=r"no engine could fetch .* access is denied") as caught:
            await LearnerRun(stage.but(start_seconds=1.0)).main()
        assert caught.value.failure().code == "storage_inaccessible"
