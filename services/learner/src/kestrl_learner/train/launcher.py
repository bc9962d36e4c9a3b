"""Starts a learner's ranks on its machine and watches them, and those of other pods: all of them are one unit, which
ends and restarts as a whole.

The learner's own process is rank 0. A rank that a signal ended, such as the kernel's out-of-memory killer's, ends the
learner with the same status, and whatever supervises the learner starts it again from its checkpoint. So does the loss
of another pod, with `EXIT_LOST`. A rank that failed by itself fails the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import torch

from kestrl._shared.conventions import EXIT_FAILED
from kestrl.errors import UserInputError
from kestrl_learner.ranks.group import EXIT_LOST, LOOPBACK, RankGroup, RankLost, meeting_point
from kestrl_learner.ranks.places import await_loss, await_places, end_watch, open_gang
from kestrl_learner.ranks.rank_processes import start_rank
from kestrl_learner.train.commands import RankCommands
from kestrl_learner.train.compute import Compute, ComputeSettings, OneProcess, OnRanks, RankWork

log = logging.getLogger(__name__)
END_SECONDS = 10.0
"""Time for the other ranks to end after rank 0, and after a failed collective for the rank that caused it."""
BLOCKED_SECONDS = 60.0
"""Time for rank 0 to notice that another rank has failed."""
KILLED = 128
"""Exit statuses above it are of processes that a signal ended, as of a shell."""


class RankProcesses:
    """The ranks other than 0: processes of this machine, and those of other pods.

    Args:
        count: Number of ranks, with rank 0.
        port: Port of rank 0's store.
        device: Type of the ranks' devices.
        exit_process: Ends this process at once with a status.
        per_machine: Ranks of each machine; None if all are on this one.
    """

    def __init__(
        self,
        count: int,
        port: int,
        device: str,
        exit_process: Callable[[int], object] = os._exit,
        *,
        per_machine: int | None = None,
    ) -> None:
        self._exit, self._closing = exit_process, False
        ranks_here = count if per_machine is None else per_machine
        self._others = ranks_here < count
        self._failed = threading.Event()
        self.busy = threading.Lock()
        """Held while the ranks perform a command."""
        self.failure = ""
        """Why the ranks ended before they were let to."""
        address = f"{LOOPBACK}:{port}"
        self._processes = {rank: start_rank(rank, count, ranks_here, address, device) for rank in range(1, ranks_here)}
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True)
            for rank, process in self._processes.items()
        ]
        if self._others:
            self._watchers.append(
                threading.Thread(target=self._watch_pods, args=(address, count), name="watch-pods", daemon=True)
            )
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
        self._fail(f"rank {rank} ended with exit code {status}; its log lines above say why")

    def _watch_pods(self, address: str, count: int) -> None:
        loss = await_loss(address, count)
        if loss is None or self._closing or self._failed.is_set():
            return
        if loss.failed:
            self._fail(f"{loss.message}; the log of its pod says more")
        else:
            self._end_lost(loss.message)

    def _end_lost(self, message: str) -> None:
        error = RankLost(f"{message}; the learner ends, to resume from its checkpoint")
        sys.stderr.write(f"error: {error.failure()}\n")
        self._end_process(EXIT_LOST)

    def _fail(self, message: str) -> None:
        self.failure = message
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
        """Waits for the rank that caused a failed collective: if a signal ended it, or if it is in another pod and has
        not failed by itself, this process ends here.

        Raises:
            RankLost: A rank failed by itself; names it.
        """
        if self._failed.wait(END_SECONDS):
            raise RankLost(self.failure, retryable=False)
        if self._others and not self._closing:
            self._end_lost("a rank of another pod ended or did not answer")

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


class Gang:
    """Rank 0's handle of all ranks, with the model loaded.

    Args:
        settings: Of the run.
        exit_process: Ends this process at once with a status.
        waiting: Called with what the gang waits for, while ranks of other pods are missing.

    Raises:
        UserInputError: The model cannot be loaded, there are too few devices, or the store's port is taken.
        RankLost: A rank ended while it started, or did not come.
    """

    def __init__(
        self,
        settings: ComputeSettings,
        exit_process: Callable[[int], object] = os._exit,
        *,
        waiting: Callable[[str], None] = log.info,
    ) -> None:
        refuse_missing_devices(settings)
        self._closed = False
        count, ranks_here = settings.ranks, settings.ranks_per_pod
        store = self._store = meeting_point(count, settings.ranks_listen)
        open_gang(store, count)
        await_places(store, range(ranks_here, count), waiting, settings.start_seconds)
        self._processes = RankProcesses(count, store.port, settings.device, exit_process, per_machine=ranks_here)
        try:
            try:
                self._group = RankGroup(store, 0, count, settings.device, per_machine=ranks_here)
            except RankLost:
                self._processes.settle()
                raise
            work = RankWork(self._group)
            self._commands = RankCommands(self._group, work, self._processes.settle, self._processes.busy)
            self._commands.order("load", settings)
        except BaseException:
            end_watch(store)
            self._processes.close()
            raise
        self.pids = self._processes.pids()
        """Process ids of the other ranks of this machine, by rank."""
        log.info("%d ranks; processes of the others on this machine: %s", count, self.pids)
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
        end_watch(self._store)
        self._processes.close()
        self._group.leave()


def refuse_missing_devices(settings: ComputeSettings) -> None:
    """Refuses more ranks of this machine than it has devices.

    Raises:
        UserInputError: There are fewer.
    """
    count = torch.accelerator.device_count()
    if settings.device != "cpu" and count < settings.ranks_per_pod:
        raise UserInputError(
            f"spec.learner.accelerator.count: {settings.ranks_per_pod} devices, and {count} are visible here; lower it"
            ", or on one machine an AgentRLJob's spec.learner.replicas"
        )


def load_compute(
    settings: ComputeSettings, waiting: Callable[[str], None] = log.info
) -> tuple[Compute, Callable[[], None]]:
    """The model and its trainer on as many ranks as the settings say, and what ends the ranks.

    Args:
        settings: Of the run.
        waiting: Called with what the ranks wait for, while some of other pods are missing.

    Raises:
        UserInputError: The model cannot be loaded, or there are too few devices.
        RankLost: A rank ended while it started.
    """
    if settings.ranks == 1:
        return OneProcess(settings), lambda: None
    gang = Gang(settings, waiting=waiting)
    return gang.compute, gang.close
