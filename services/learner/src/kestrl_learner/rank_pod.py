"""`python -m kestrl_learner.rank_pod --settings FILE`: the ranks of a pod beside the learner's.

The pod starts its ranks when the learner listens, and again after each end of their gang. It is ready as soon as it can
do so, which does not depend on the learner: a rollout of new pods must not wait for ranks that wait for it. A rank that
a signal ended, or that failed by itself, ends the pod's program with the reason, and Kubernetes starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.settings.common import INDEX_VARIABLE
from kestrl._shared.plan.settings.learner import RanksSettings
from kestrl._shared.rpc import serve
from kestrl._shared.service import run_service
from kestrl.errors import KestrlError, UserInputError
from kestrl_learner.ranks.rank_processes import rank_command

log = logging.getLogger(__name__)
EXIT_LOST = 3
"""Exit code of a rank that ends because another one did: that of `kestrl_learner.ranks.group`, which imports torch."""
ASK_SECONDS = 1.0
"""Interval of attempts to reach the learner."""
CONNECT_SECONDS = 5.0
BACKOFF = Backoff(1.0, 30.0)
"""Pauses before the ranks are started again: the first one after a long gang, longer ones after short gangs."""
LONG_GANG = 60.0
"""Seconds of a gang after which the pause is the first one."""
END_SECONDS = 5.0
"""Time for ranks to end after the first of them, and after SIGTERM."""


class RankEnded(KestrlError):
    """A rank of this pod was ended by a signal or failed by itself."""

    code = "rank_lost"
    retryable = True


class RankPod:
    """The ranks of this pod.

    Args:
        settings: Of the pods.
        index: Number of this pod, from 0: the ordinal of its StatefulSet. The learner's pod has the ranks before.
    """

    def __init__(self, settings: RanksSettings, index: int) -> None:
        ranks_here = settings.ranks_per_pod
        self._settings, self._here = settings, ranks_here
        self._ranks = range((index + 1) * ranks_here, (index + 2) * ranks_here)

    async def main(self) -> None:
        """Has the ranks join one gang after the other until it is cancelled.

        Raises:
            RankEnded: One of them was ended by a signal, or failed by itself.
        """
        loop, short_gangs = asyncio.get_running_loop(), 0
        while True:
            await self._await_learner()
            began = loop.time()
            await self._one_gang()
            short_gangs = 0 if loop.time() - began > LONG_GANG else short_gangs + 1
            await asyncio.sleep(BACKOFF.pause(1 + short_gangs))

    async def _await_learner(self) -> None:
        """Waits until something listens at the address of rank 0's store."""
        host, _, port = self._settings.leader.rpartition(":")
        log.info("waits for the learner at %s", self._settings.leader)
        while True:
            with suppress(OSError, TimeoutError):  # it is asked again
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            await asyncio.sleep(ASK_SECONDS)

    async def _one_gang(self) -> None:
        processes = [await self._start(rank) for rank in self._ranks]
        ends = [asyncio.create_task(process.wait()) for process in processes]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=END_SECONDS)
            statuses = {rank: end.result() for rank, end in zip(self._ranks, ends, strict=True) if end.done()}
        finally:
            await _end(processes)
        _check(statuses)
        log.info("the gang has ended")

    async def _start(self, rank: int) -> asyncio.subprocess.Process:
        settings = self._settings
        command = rank_command(rank, settings.ranks, self._here, settings.leader, settings.device)
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)


def _check(statuses: dict[int, int]) -> None:
    """Raises `RankEnded` for the first rank that neither ended with its gang nor because of another rank."""
    for rank, status in statuses.items():
        if status < 0:
            raise RankEnded(f"rank {rank} was ended by signal {-status}")
        if status not in {0, EXIT_LOST}:
            raise RankEnded(f"rank {rank} ended with exit code {status}; its log lines above say why")


async def _end(processes: list[asyncio.subprocess.Process]) -> None:
    """Kills the processes: a rank has nothing to save."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
    await asyncio.gather(*(process.wait() for process in processes))


def own_index() -> int:
    """The number of this pod, from its environment.

    Raises:
        UserInputError: The variable is missing or no number.
    """
    text = os.environ.get(INDEX_VARIABLE, "")
    if not text.isdecimal():
        raise UserInputError(f"{INDEX_VARIABLE}: {text!r} is not the ordinal of a pod; the operator sets it")
    return int(text)


async def work(settings: RanksSettings) -> None:
    """Serves health, and runs the pod's ranks until it is stopped."""
    ranks = asyncio.create_task(RankPod(settings, own_index()).main(), name="ranks")

    async def drain() -> None:
        ranks.cancel()
        await asyncio.wait([ranks])

    await serve(settings.component, settings.listen, lambda _: None, drain=drain, until=ranks)


if __name__ == "__main__":
    sys.exit(run_service(RanksSettings, work))
