"""Starts a learner's ranks on its machine and watches them: all of them are one unit, which ends and restarts as a
whole.

The learner's own process is rank 0. A rank that a signal ended, such as the kernel's out-of-memory killer's, ends the
learner with the same status, and whatever supervises the learner starts it again from its checkpoint. A rank that
failed by itself fails the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import torch

from kestrl.errors import UserInputError
from kestrl.plan.settings import LearnerSettings
from kestrl.service import EXIT_FAILED
from kestrl_learner.commands import Commands
from kestrl_learner.compute import Compute, OneProcess, OnRanks, RankWork
from kestrl_learner.ranks import EXIT_LOST, Group, RankLost, meeting_point

log = logging.getLogger(__name__)
END_SECONDS = 10.0
"""Time for the other ranks to end after rank 0, and after a failed collective for the rank that caused it."""
BLOCKED_SECONDS = 60.0
"""Time for rank 0 to notice that another rank has failed."""
KILLED = 128
"""Exit statuses above it are of processes that a signal ended, as of a shell."""


class RankProcesses:
    """The processes of the ranks other than 0.

    Args:
        count: Number of ranks, with rank 0.
        port: Port of rank 0's store.
        device: Type of the ranks' devices.
        exit_process: Ends this process at once with a status.
    """

    def __init__(self, count: int, port: int, device: str, exit_process: Callable[[int], object] = os._exit) -> None:
        self._exit, self._closing = exit_process, False
        self._failed = threading.Event()
        self.busy = threading.Lock()
        """Held while the ranks perform a command."""
        self.failure = ""
        """Why the ranks ended before they were let to."""
        self._processes = {rank: start_rank(rank, count, port, device) for rank in range(1, count)}
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True)
            for rank, process in self._processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing or self._failed.is_set() or status in {0, EXIT_LOST}:
            return
        if status < 0:
            # Rank 0's own end by the same signal, so that it is supervised as such.
            message = f"rank {rank} was ended by signal {-status}; the learner ends, to resume from its checkpoint"
            log.error("%s", message)
            self._end_process(KILLED - status)
            return
        self.failure = f"rank {rank} ended with exit code {status}; its log lines above say why"
        self._failed.set()
        if self.busy.acquire(timeout=BLOCKED_SECONDS):
            self.busy.release()
        else:  # a collective of an accelerator does not notice
            sys.stderr.write(f"error: {RankLost(self.failure).failure()}\n")
            self._end_process(EXIT_FAILED)

    def _end_process(self, status: int) -> None:
        self._closing = True
        self._kill()
        sys.stderr.flush()
        self._exit(status)

    def settle(self) -> None:
        """Waits for the rank that caused a failed collective: if a signal ended it, this process ends here.

        Raises:
            RankLost: A rank failed by itself; names it.
        """
        if self._failed.wait(END_SECONDS):
            raise RankLost(self.failure, retryable=False)

    def close(self) -> None:
        """Waits a little for the ranks to end, and kills them."""
        self._closing = True
        for watcher in self._watchers:
            watcher.join(END_SECONDS)
        self._kill()
        for process in self._processes.values():
            process.wait()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()


def start_rank(rank: int, count: int, port: int, device: str) -> subprocess.Popen[bytes]:
    """Starts the process of a rank, which writes to this process's log."""
    ours = [sys.executable, "-m", "kestrl_learner.rank"]
    given = ["--rank", str(rank), "--count", str(count), "--port", str(port), "--device", device]
    return subprocess.Popen([*ours, *given], stdin=subprocess.DEVNULL)  # noqa: S603 - this program


class Gang:
    """Rank 0's handle of all ranks, with the model loaded.

    Args:
        settings: Of the run.
        exit_process: Ends this process at once with a status.

    Raises:
        UserInputError: The model cannot be loaded, or there are too few devices.
        RankLost: A rank ended while it started.
    """

    def __init__(self, settings: LearnerSettings, exit_process: Callable[[int], object] = os._exit) -> None:
        refuse_missing_devices(settings)
        self._closed = False
        store = meeting_point(settings.ranks)
        self._processes = RankProcesses(settings.ranks, store.port, settings.device, exit_process)
        try:
            try:
                self._group = Group(store, 0, settings.ranks, settings.device)
            except RankLost:
                self._processes.settle()
                raise
            work = RankWork(self._group)
            self._commands = Commands(self._group, work, self._processes.settle, self._processes.busy)
            self._commands.order("load", settings)
        except BaseException:
            self._processes.close()
            raise
        self.pids = self._processes.pids()
        """Process ids of the other ranks, by rank."""
        log.info("%d ranks; processes of the others: %s", settings.ranks, self.pids)
        self.compute = OnRanks(self._commands.order, work)

    def close(self) -> None:
        """Ends the other ranks. No effect if they have been."""
        if self._closed:
            return
        self._closed = True
        try:
            self._commands.end()
        except RankLost as error:
            log.warning("%s", error)
        self._processes.close()
        self._group.leave()


def refuse_missing_devices(settings: LearnerSettings) -> None:
    """Refuses more ranks than there are devices.

    Raises:
        UserInputError: There are fewer.
    """
    found = torch.accelerator.device_count()
    if settings.device != "cpu" and found < settings.ranks:
        raise UserInputError(
            f"spec.learner.accelerator.count: {settings.ranks} devices, and {found} are visible here; lower it"
        )


def load_compute(settings: LearnerSettings) -> tuple[Compute, Callable[[], None]]:
    """The model and its trainer on as many ranks as the settings say, and what ends the ranks.

    Raises:
        UserInputError: The model cannot be loaded, or there are too few devices.
        RankLost: A rank ended while it started.
    """
    if settings.ranks == 1:
        return OneProcess(settings), lambda: None
    gang = Gang(settings)
    return gang.compute, gang.close
