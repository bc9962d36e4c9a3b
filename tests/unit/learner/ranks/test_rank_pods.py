"""Ranks of other pods: how they join the learner, and how it learns that one of them is gone."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.ports import free_port
from tests.unit.learner.conftest import make_settings
from tests.unit.learner.ranks.forked_ranks import CONTEXT
from tests.unit.learner.train.test_training import make_groups
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.settings.learner import RanksSettings
from kestrl.errors import UserInputError
from kestrl_learner import rank, rank_pod
from kestrl_learner.rank_pod import RankEnded, RankPod, own_index
from kestrl_learner.ranks import group as ranks
from kestrl_learner.ranks import places
from kestrl_learner.ranks.group import EXIT_LOST, LOOPBACK, RankLost, meet, meeting_point
from kestrl_learner.ranks.places import (
    COMPLETE,
    Loss,
    await_loss,
    await_places,
    end_watch,
    gang_of,
    leave_with,
    open_gang,
    place,
    report_loss,
    take_place,
)
from kestrl_learner.train import launcher
from kestrl_learner.train.compute import OneProcess
from kestrl_learner.train.launcher import Gang, RankProcesses

pytestmark = pytest.mark.timeout(180)


def address_of(store: TCPStore) -> str:
    return f"{LOOPBACK}:{store.port}"


@contextmanager
def started(work: Callable[..., Any], *given: Any) -> Generator[Future[Any]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(work, *given)


# Places


def test_a_gang_is_complete_when_every_place_is_taken() -> None:
    store, said = meeting_point(3), list[str]()
    gang = open_gang(store, 3)
    with started(take_place, meet(address_of(store), 3), 1) as one:
        store.wait([place(1)])
        with started(take_place, meet(address_of(store), 3), 2) as two:
            await_places(store, (1, 2), said.append, 60)
            assert one.result() is two.result() is None
    assert gang_of(meet(address_of(store), 3), 3) == gang
    assert said in ([], ["waits for ranks 2 of other pods"])


def test_missing_ranks_are_named_and_have_a_time_limit() -> None:
    store, said = meeting_point(3), list[str]()
    store.set(place(1), "")
    with pytest.raises(RankLost, match=r"ranks 2, 3 of other pods did not join within 0 s"):
        await_places(store, (1, 2, 3), said.append, 0)
    assert not store.check([COMPLETE])


def test_a_rank_started_for_another_number_does_not_join() -> None:
    store = meeting_point(3)
    open_gang(store, 3)
    with pytest.raises(RankLost, match="the learner has 3 ranks, and this rank was started for 2"):
        gang_of(meet(address_of(store), 2), 2)


def test_a_rank_started_again_replaces_one_that_waits() -> None:
    store = meeting_point(2)
    open_gang(store, 2)
    with started(take_place, meet(address_of(store), 2), 1) as old:
        store.wait([place(1)])
        token = store.get(place(1))
        with started(take_place, meet(address_of(store), 2), 1) as new:
            while store.get(place(1)) == token:
                pass
            await_places(store, (1,), lambda _: None, 60)
            assert new.result() is None
        with pytest.raises(RankLost, match="another process has taken the place of rank 1"):
            old.result()


def test_a_complete_gang_learns_of_the_rank_that_it_lost() -> None:
    """The rank then waits, without being started again and again, until the learner ends."""
    store = meeting_point(2)
    store.set(COMPLETE, "")
    with started(take_place, meet(address_of(store), 2), 1) as late:
        assert await_loss(address_of(store), 2) == Loss("rank 1 ended and was started again", failed=False)
        assert not late.done()
        del store
        with pytest.raises(RankLost):
            late.result(60)


def test_a_gang_that_has_ended_gets_no_report() -> None:
    store = meeting_point(2)
    store.set(COMPLETE, "")
    end_watch(store)
    with started(take_place, meet(address_of(store), 2), 1) as late:
        assert await_loss(address_of(store), 2) is None
        del store
        with pytest.raises(RankLost):
            late.result(60)


def test_the_wait_for_a_loss_ends_with_the_gang() -> None:
    store = meeting_point(2)
    with started(await_loss, address_of(store), 2) as reported:
        end_watch(store)
        assert reported.result() is None


def test_a_rank_leaves_a_gang_that_another_has_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CHECK_SECONDS", 0.02)
    store, ended = meeting_point(2), queue.Queue[int]()
    leave_with(open_gang(store, 2), address_of(store), 2, ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    open_gang(store, 2)
    assert ended.get(timeout=60) == EXIT_LOST


def test_a_rank_ends_when_its_learner_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(places, "CHECK_LIMIT", 0.1)
    ended: queue.Queue[int] = queue.Queue()
    leave_with("gang", f"{LOOPBACK}:{free_port()}", 2, ended.put)
    assert ended.get(timeout=60) == EXIT_LOST


def test_a_taken_port_of_the_store_is_one_error() -> None:
    store = meeting_point(2)
    with pytest.raises(UserInputError, match=f"{store.port}: the ranks cannot meet there"):
        meeting_point(2, address_of(store))


def test_a_rank_of_another_pod_reports_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no memory")

    def ignore(*_: Any) -> None:
        pass

    monkeypatch.setattr(rank, "follow_rank_0", fail)
    monkeypatch.setattr(places, "leave_with", ignore)
    store = meeting_point(2)
    open_gang(store, 2)
    given = argparse.Namespace(rank=1, count=2, per_machine=1, store=address_of(store), device="cpu")
    with started(rank.follow_from_another_pod, given, meet(address_of(store), 2)) as ended:
        await_places(store, (1,), lambda _: None, 60)
        assert isinstance(ended.exception(), ValueError)
    assert await_loss(address_of(store), 2) == Loss("rank 1: ValueError: no memory", failed=True)


# The learner


@pytest.mark.parametrize("failed", [False, True])
def test_a_loss_in_another_pod_ends_the_learner(
    failed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart follows a rank that was ended; one that failed by itself fails the run."""
    monkeypatch.setattr(launcher, "END_SECONDS", 60.0 if failed else 0.1)
    store, ended = meeting_point(2), queue.Queue[int]()
    processes = RankProcesses(2, store.port, "cpu", ended.put, per_machine=1)
    report_loss(store, Loss("rank 1: no memory", failed=failed))
    if failed:
        with pytest.raises(RankLost, match="rank 1: no memory; the log of its pod says more") as raised:
            processes.settle()
        assert not raised.value.retryable
        assert ended.empty()
    else:
        assert ended.get(timeout=60) == EXIT_LOST
        assert "error: [infrastructure/rank_lost] rank 1: no memory; the learner ends" in capsys.readouterr().err
    processes.close()


def test_a_collective_that_another_pod_broke_ends_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "END_SECONDS", 0.1)
    store, ended = meeting_point(2), queue.Queue[int]()
    processes = RankProcesses(2, store.port, "cpu", ended.put, per_machine=1)
    processes.settle()
    assert ended.get(timeout=60) == EXIT_LOST
    end_watch(store)
    processes.close()


# The pod of ranks


def pod_settings(port: int, **changes: Any) -> RanksSettings:
    given: dict[str, Any] = {
        "component": "ranks-0",
        "job": "test",
        "run": "test-1",
        "listen": f"{LOOPBACK}:{free_port()}",
        "leader": f"{LOOPBACK}:{port}",
        "device": "cpu",
        "ranks": 2,
        "pods": 2,
    }
    return RanksSettings.model_validate(given | changes)


def scripted(monkeypatch: pytest.MonkeyPatch, program: str) -> list[tuple[Any, ...]]:
    """Ranks that run a program with their number and that of their starts; returns what they are started with."""
    begun: list[tuple[Any, ...]] = []

    def command(*given: Any) -> list[str]:
        begun.append(given)
        return [sys.executable, "-I", "-S", "-c", program, str(given[0]), str(len(begun))]

    monkeypatch.setattr(rank_pod, "rank_command", command)
    monkeypatch.setattr(rank_pod, "BACKOFF", Backoff(0.01, 0.01))
    return begun


LOST_TWICE = f"import sys; sys.exit({EXIT_LOST} if int(sys.argv[2]) <= 4 else 7)"
KILLED_RANK_5 = "import os, sys, time; os.kill(os.getpid(), 9) if sys.argv[1] == '5' else time.sleep(600)"


async def test_a_pod_joins_one_gang_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = meeting_point(6)
    begun = scripted(monkeypatch, LOST_TWICE)
    with pytest.raises(RankEnded, match="rank 4 ended with exit code 7"):
        await RankPod(pod_settings(store.port, ranks=6, pods=3), 1).main()
    assert [given[0] for given in begun] == [4, 5] * 3, "the third of three pods"
    assert begun[0] == (4, 6, 2, address_of(store), "cpu")


async def test_a_killed_rank_ends_its_pod_and_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pod, "END_SECONDS", 0.1)
    store = meeting_point(4)
    scripted(monkeypatch, KILLED_RANK_5.replace("'5'", "'3'"))
    with pytest.raises(RankEnded, match="rank 3 was ended by signal 9"):
        await RankPod(pod_settings(store.port, ranks=4, pods=2), 0).main()


async def test_a_stopped_pod_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = meeting_point(2)
    begun = scripted(monkeypatch, "import time; time.sleep(600)")
    task = asyncio.create_task(RankPod(pod_settings(store.port), 0).main())
    while not begun:  # noqa: ASYNC110 - the pod has no event for it
        await asyncio.sleep(0.01)
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_a_pod_starts_no_rank_before_the_learner_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rank_pod, "ASK_SECONDS", 0.05)
    port = free_port()
    begun = scripted(monkeypatch, "import sys; sys.exit(7)")
    task = asyncio.create_task(RankPod(pod_settings(port), 0).main())
    while "waits for the learner" not in caplog.text:  # noqa: ASYNC110 - it says so in its log only
        await asyncio.sleep(0.01)
    assert not begun
    store = meeting_point(2, f"{LOOPBACK}:{port}")
    async with asyncio.timeout(60):
        with pytest.raises(RankEnded):
            await task
    assert len(begun) == 1
    assert store.port == port


def test_the_exit_code_of_a_lost_rank_is_one() -> None:
    assert rank_pod.EXIT_LOST == ranks.EXIT_LOST


@pytest.mark.parametrize("text", [None, "", "ranks-1", "-1"])
def test_a_pod_without_its_ordinal_is_refused(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KESTRL_INDEX", raising=False)
    if text is not None:
        monkeypatch.setenv("KESTRL_INDEX", text)
    with pytest.raises(UserInputError, match="KESTRL_INDEX"):
        own_index()


# Whole


@contextmanager
def pod_process(settings: RanksSettings, folder: Path) -> Generator[Callable[[], int]]:
    """A pod of ranks, started again when it ends, as by a kubelet; yields what returns the process id of its rank."""
    path = folder / "ranks.json"
    path.write_text(settings.model_dump_json())
    running = threading.Event()
    pods: list[asyncio.subprocess.Process] = []

    async def restarting() -> None:
        command = [sys.executable, "-m", "kestrl_learner.rank_pod", "--settings", str(path)]
        environment = {**os.environ, "KESTRL_INDEX": "0"}
        while not running.is_set():
            pods.append(await asyncio.create_subprocess_exec(*command, env=environment))
            await pods[-1].wait()

    def rank_id() -> int:
        children = Path(f"/proc/{pods[-1].pid}/task/{pods[-1].pid}/children").read_text().split()
        return int(children[0])

    kubelet = threading.Thread(target=asyncio.run, args=(restarting(),))
    kubelet.start()
    try:
        yield rank_id
    finally:
        running.set()
        pods[-1].terminate()
        kubelet.join()


def stepped(compute: Any, number: int, state: bytes | None = None) -> tuple[dict[str, Any], bytes]:
    """Weights and state after a step."""
    trainer = compute.trainer(2)
    if state is not None:
        trainer.restore(state)
    trainer.published("policy")
    trainer.step(make_groups(seed=number), number)
    return {name: weight.numpy().copy() for name, weight in compute.model.adapter_state().items()}, trainer.state()


def one_step(settings: Any, number: int, state: bytes | None, out: Connection, ends: Connection) -> None:
    """A learner that takes one step and ends when something is sent to it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gang = Gang(settings)
    out.send(stepped(gang.compute, number, state))
    ends.recv()
    gang.close()


@contextmanager
def learner(*given: Any) -> Generator[tuple[Any, Connection, Connection]]:
    """A process of `one_step`, the result of its step, and what ends it."""
    (found, out), (ends, end) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=one_step, args=(*given, out, ends))
    process.start()
    out.close()
    try:
        yield process, found, end
    finally:
        process.kill()
        process.join()


@pytest.mark.share(2)
def test_a_killed_rank_of_another_pod_costs_a_resume_and_nothing_else(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is killed between two steps, which are those of one unbroken process within 1e-5."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    settings = make_settings(
        tmp_path,
        models["qwen3"],
        rollout_addresses=(),
        engines=(),
        ranks=2,
        pods=2,
        ranks_listen=f"{LOOPBACK}:{port}",
        start_seconds=120.0,
    )
    with pod_process(pod_settings(port), tmp_path) as rank_id:
        with learner(settings, 0, None) as (process, found, _):
            _, state = found.recv()
            os.kill(rank_id(), signal.SIGKILL)
            process.join(120)
            assert process.exitcode == EXIT_LOST
        with learner(settings, 1, state) as (process, found, end):
            weights, _ = found.recv()
            end.send(None)
            process.join(120)
            assert process.exitcode == 0
    whole = OneProcess(settings)
    _, state = stepped(whole, 0)
    unbroken, _ = stepped(whole, 1, state)
    for name, weight in unbroken.items():
        assert abs(weights[name] - weight).max() <= 1e-5, name
