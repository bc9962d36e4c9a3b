"""The learner's ranks as processes: commands, a whole run, and what becomes of a rank that is killed or fails."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.learner.conftest import make_settings
from tests.unit.learner.ranks.forked_ranks import on_ranks

from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.errors import KestrlError, UserInputError
from kestrl_learner.ranks.group import EXIT_LOST, RankGroup, RankLost
from kestrl_learner.run import LearnerRun
from kestrl_learner.train import launcher
from kestrl_learner.train.commands import RankCommands, follow
from kestrl_learner.train.compute import RankWork
from kestrl_learner.train.launcher import Gang, RankProcesses, refuse_missing_devices

pytestmark = pytest.mark.timeout(180)


# Commands


class Work(RankWork):
    """Operations that fail on one rank, on all or on none."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._group = group
        self.seen: list[str] = []

    def published(self, policy: str) -> None:
        self.seen.append(policy)
        failing = policy.removeprefix("fails on ")
        if failing in {"all", str(self._group.rank)}:
            raise KestrlError(policy, code="as_ordered")


def ordered(group: RankGroup, names: list[str]) -> tuple[list[str], list[str]]:
    """The operations that this rank has seen, and on rank 0 the errors."""
    work, errors = Work(group), list[str]()
    if group.rank:
        follow(group, work)
        return work.seen, errors
    commands = RankCommands(group, work, lambda: errors.append("settled"), threading.Lock())
    for name in names:
        try:
            commands.order("published", name)
        except KestrlError as error:
            errors.append(f"{error.code}: {error}")
    commands.end()
    commands.end()
    return work.seen, errors


def test_every_rank_performs_each_command_in_order() -> None:
    names = ["first", "fails on all", "second"]
    found = on_ranks(3, ordered, names)
    assert found == [(names, ["as_ordered: fails on all"]), (names, []), (names, [])]


def test_a_command_that_fails_on_one_rank_only_ends_the_ranks() -> None:
    (seen, errors), _ = on_ranks(2, ordered, ["fails on 1", "second"])
    assert seen == ["fails on 1"]
    assert errors[0].startswith("rank_lost: published: rank 1: as_ordered")
    assert errors[1].startswith("rank_lost: published: the ranks have ended")


def loaded(group: RankGroup, settings: Any) -> str:
    if group.rank:
        follow(group, RankWork(group))
        return ""
    commands = RankCommands(group, RankWork(group), lambda: None, threading.Lock())
    try:
        commands.order("load", settings)
    except UserInputError as error:
        return str(error)
    finally:
        commands.end()
    raise AssertionError("it was loaded")


def test_a_model_that_no_rank_can_load_is_one_error(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, tmp_path / "nothing", rollout_addresses=(), engines=(), ranks=2)
    assert "spec.model.base" in on_ranks(2, loaded, settings)[0]


def test_more_ranks_than_devices_are_refused_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    given: Any = {"rollout_addresses": (), "engines": ()}
    with pytest.raises(UserInputError, match=r"spec\.learner\.accelerator\.count: 2 devices, and 1 "):
        refuse_missing_devices(make_settings(tmp_path, tmp_path, ranks=2, device="cuda", **given))
    refuse_missing_devices(make_settings(tmp_path, tmp_path, ranks=2, **given))


# Processes


def scripted(monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    """Ranks that run these programs."""

    def start(rank: int, *_: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", programs[rank - 1]])

    monkeypatch.setattr(launcher, "start_rank", start)


def test_a_rank_that_fails_by_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that ends because of it."""
    scripted(monkeypatch, f"raise SystemExit({EXIT_LOST})", "raise SystemExit(7)")
    processes = RankProcesses(3, 0, "cpu", exit_process=lambda _: None)
    with pytest.raises(RankLost, match="rank 2 ended with exit code 7") as raised:
        processes.settle()
    assert not raised.value.retryable
    processes.close()


def test_a_failed_rank_ends_a_learner_that_is_blocked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rank fails during a command: one that fails between two is reported by the next."""
    started = tmp_path / "started"
    os.mkfifo(started)
    monkeypatch.setattr(launcher, "BLOCKED_SECONDS", 0.1)
    ended: queue.Queue[int] = queue.Queue()
    fails = f"open({str(started)!r}).read(); raise SystemExit(1)"
    scripted(monkeypatch, fails, "import time; time.sleep(600)")
    processes = RankProcesses(3, 0, "cpu", exit_process=ended.put)
    with processes.busy:
        started.write_text("")  # waits for the rank to read it
        assert ended.get(timeout=60) == 1
    assert "error: [infrastructure/rank_lost] rank 1 ended with exit code 1" in capsys.readouterr().err
    processes.close()


# Whole


async def test_a_run_on_two_ranks_succeeds_and_resumes_on_one(staged: Any) -> None:
    """Against engines that compute log-probs with what was published."""
    async with staged(
        ranks=2, start_seconds=60.0, deadlines=RolloutDeadlines(tool=1.0, turn=2.0, episode=60.0, group=90.0)
    ) as stage:
        for settings, steps in ((stage.but(max_steps=2), 2), (stage.but(ranks=1, max_steps=4), 4)):
            run = LearnerRun(settings)
            async with asyncio.timeout(120):
                await run.main()
            assert (stage.summary["status"], stage.summary["steps"]) == ("succeeded", steps)
            assert stage.summary["logprob_gap"]["worst"] <= 1e-4
        assert stage.states["trained"] == 8
        assert len({stage.adapter_bytes(step) for step in range(5)}) == 5


def test_a_killed_rank_ends_the_learner_as_if_killed_itself(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "END_SECONDS", 0.1)
    settings = make_settings(tmp_path, models["qwen3"], rollout_addresses=(), engines=(), ranks=2)
    ended: queue.Queue[int] = queue.Queue()
    gang = Gang(settings, exit_process=ended.put)
    assert len(gang.compute.model.score([1, 2, 3], adapter=True)) == 2
    os.kill(gang.pids[1], signal.SIGKILL)
    assert ended.get(timeout=60) == 128 + signal.SIGKILL
    with pytest.raises(RankLost, match="score"):
        gang.compute.model.score([1, 2, 3], adapter=True)
    gang.close()
