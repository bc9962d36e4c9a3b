"""A job that kills the operator: the next start finds out which one it was, and leaves it alone until its spec
changes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.ports import free_port

from .stage import JOB, NAMESPACE, UNSEEN, VALUES, Stage

KILLED = """
import os, signal, sys
from kestrl_operator.controllers import manifests
from kestrl_operator.__main__ import main

read = manifests.Manifests.read

def deadly(self, key, raw):
    if raw["spec"]["data"]["train"].get("size") == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, key, raw)

manifests.Manifests.read = deadly
sys.exit(main())
"""
"""The operator, with a simulated bug: one spec kills it in the middle of its own code."""
DEADLY = {"data": {"train": {"uri": "demo://email/train", "size": 666}}}


@asynccontextmanager
async def process(stage: Stage, work_file: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """An operator in a process of its own, as in a container."""
    config = {
        "jobs": VALUES,
        "keyFile": str(stage.folder / "key"),
        "lease": {"namespace": "kestrl-system", "seconds": 2.0},
        "healthListen": f"127.0.0.1:{free_port()}",
        "metricsListen": f"127.0.0.1:{free_port()}",
        "workFile": str(work_file),
    }
    path = stage.folder / "operator.yaml"
    path.write_text(yaml.safe_dump(config))
    stage.patch.setenv("KUBECONFIG", str(stage.cluster.write_kubeconfig(stage.folder, user="own")))
    made = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, "--config", str(path))
    try:
        yield made
    finally:
        if made.returncode is None:
            made.terminate()
        async with asyncio.timeout(20):
            await made.wait()


async def test_a_spec_that_killed_the_operator_is_quarantined(stage: Stage) -> None:
    work_file = stage.folder / "at-work"
    stage.job("killer", **DEADLY)
    async with process(stage, work_file) as first:
        async with asyncio.timeout(20):
            assert await first.wait() == -signal.SIGKILL
    assert stage.status("killer") == {**UNSEEN, "installation": "kestrl-system/kestrl-operator"}
    stage.job()
    async with process(stage, work_file) as second:
        await stage.until(lambda: stage.condition("Ready", "killer")[1] == "Quarantined", "it is quarantined")
        await stage.applied()
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 2}}})
        await stage.until(lambda: stage.status()["observedGeneration"] == 2, "passes go on")
        assert second.returncode is None
        assert "generation 1" in stage.condition("Ready", "killer")[2]
        assert stage.phase("killer") == "Quarantined"
        assert stage.children("killer") == []
        stage.cluster.edit("agentrljobs", NAMESPACE, "killer", {"spec": {"data": {"train": {"size": 640}}}})
        await stage.applied("killer")
        await stage.until(lambda: stage.condition("Ready", "killer")[1] == "NotReady", "it is looked at again")
    assert second.returncode == 0
    assert work_file.read_bytes() == b"", "who ends in an orderly way handles nothing"


async def test_another_replica_takes_the_quarantine_from_the_status(stage: Stage) -> None:
    work_file = stage.folder / "at-work"
    made = stage.job()["metadata"]
    work_file.write_text(json.dumps([NAMESPACE, JOB, made["uid"], made["generation"]]))
    first = await stage.operator(work_file=work_file)
    await stage.until(lambda: stage.phase() == "Quarantined", "it is quarantined")
    await stage.stop(first)
    await stage.operator("b")
    await stage.settled()
    assert stage.phase() == "Quarantined"
    assert stage.children() == []


@pytest.mark.parametrize(
    "left",
    ["", "[", json.dumps([NAMESPACE, JOB, "another", 1]), json.dumps([NAMESPACE, JOB]), '"team-a"', "null"],
    ids=["nothing", "cut", "another job of the name", "another form", "a word", "null"],
)
async def test_an_invalid_work_record_quarantines_nothing(stage: Stage, left: str) -> None:
    work_file = stage.folder / "at-work"
    work_file.write_text(left)
    await stage.operator(work_file=work_file)
    stage.job()
    await stage.applied()
    assert stage.phase() != "Quarantined"


async def test_an_operator_whose_work_file_cannot_be_written_does_not_start(stage: Stage) -> None:
    def begin(**changes: Any) -> None:
        stage.begin(**changes)

    with pytest.raises(Exception, match="workFile: /nowhere/at-work: No such file"):
        begin(work_file=Path("/nowhere/at-work"))
