"""Following the learners: one stream for each job that runs, by which its progress reaches the status.

The operator asks; a learner has no right in the cluster at all. The call carries the credential that opens this job's
learner and nothing else, which the operator derives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import time

from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl.errors import KestrlError
from kestrl.rpc import call, channel, stream
from kestrl_operator.observe import Told
from kestrl_operator.store import Key

log = logging.getLogger(__name__)
INTERVAL = 2.0
"""Seconds between two reports at the least."""
FIRST_RETRY, LONGEST_RETRY = 0.5, 15.0
FIRST_WORD = 3.0
"""Seconds in which a learner that can be reached is heard; until then nothing follows from its silence."""
DRAIN_CALL_SECONDS = 10.0
PACES = 5
LARGEST_REPORT = 4 * 1024 * 1024
"""Bytes: a learner runs a user's job, and its reports are held by the operator of all jobs."""


class Follower:
    """The stream of one learner's pod."""

    def __init__(self, key: Key, pod: str, address: str, token: str, changed: Callable[[Key], None]) -> None:
        self.key, self.pod, self.address = key, pod, address
        self._token, self._changed = token, changed
        self._paces: deque[float] = deque(maxlen=PACES)
        self._first_step: int | None = None
        """Of the first report that it trains."""
        self.told: Told | None = None
        self.silent: str = ""
        """Why it does not tell anything now."""
        self._tried, self._ends = False, asyncio.get_running_loop().time() + FIRST_WORD
        self.task = asyncio.create_task(self._follow(), name=f"follow-{key}")

    @property
    def expected(self) -> bool:
        """Whether its first word is on its way: it has neither spoken nor been found silent."""
        return not self._tried and asyncio.get_running_loop().time() < self._ends

    def _fall_silent(self, why: str) -> None:
        self._tried, self.silent = True, why
        self.told = None if self.told is None else replace(self.told, connected=False)
        self._changed(self.key)

    async def _follow(self) -> None:
        wait = FIRST_RETRY
        async with channel(self.address, largest_answer=LARGEST_REPORT) as connection:
            stub = stubs.LearnerServiceStub(connection)
            request = pb.WatchProgressRequest(min_interval_seconds=INTERVAL)
            while True:
                try:
                    async for report in stream(
                        stub.WatchProgress,
                        request,
                        pb.WatchProgressResponse,
                        timeout=None,
                        peer="learner",
                        token=self._token,
                    ):
                        self._take(report)
                        wait = FIRST_RETRY
                    why = "it has ended the stream"
                except KestrlError as error:
                    why = str(error)
                except Exception as error:
                    # A bug of ours must neither look like a silent learner nor end the listening.
                    log.exception("%s: a bug in following its learner", self.key)
                    why = f"a bug of the operator's, its log has more: {type(error).__name__}: {error}"
                speaks = not self._tried or (self.told is not None and self.told.connected)
                if speaks or why != self.silent:
                    log.info("%s: the learner does not answer: %s", self.key, why)
                    self._fall_silent(why)
                await asyncio.sleep(wait)
                wait = min(LONGEST_RETRY, 2 * wait)

    def _take(self, report: pb.WatchProgressResponse) -> None:
        now, old = time(), self.told
        stepped = now if old is None else old.stepped
        if old is not None and old.report.step != report.step:
            self._paces.append(now - old.stepped)
            stepped = now
        if old is not None and old.report.phase != report.phase:
            stepped = now
        if report.phase == "training" and (self._first_step is None or report.step < self._first_step):
            self._first_step = report.step
        self._tried, self.silent = True, ""
        self.told = Told(
            pod=self.pod,
            at=now,
            report=report,
            stepped=stepped,
            pace=max(self._paces, default=0.0),
            gained=0 if self._first_step is None else max(0, report.step - self._first_step),
        )
        self._changed(self.key)

    async def drain(self) -> None:
        """Tells the learner to finish its step, checkpoint and stop.

        Raises:
            KestrlError: It does not answer.
        """
        async with channel(self.address) as connection:
            stub = stubs.LearnerServiceStub(connection)
            await call(
                stub.Drain,
                pb.DrainRequest(),
                pb.DrainResponse,
                timeout=DRAIN_CALL_SECONDS,
                peer="learner",
                token=self._token,
            )


class Followers:
    """All streams."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._by_key: dict[Key, Follower] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def want(self, key: Key, pod: str, address: str, token: str) -> None:
        """Follows this pod; another one of the same job is followed no more."""
        known = self._by_key.get(key)
        if known is not None and (known.pod, known.address) == (pod, address):
            return
        self.stop(key)
        self._by_key[key] = Follower(key, pod, address, token, self._changed)

    def stop(self, key: Key) -> None:
        known = self._by_key.pop(key, None)
        if known is not None:
            known.task.cancel()

    def told(self, key: Key) -> Told | None:
        known = self._by_key.get(key)
        return None if known is None else known.told

    def silent(self, key: Key) -> str:
        """Why a learner that is listened to does not tell anything now."""
        known = self._by_key.get(key)
        return "" if known is None else known.silent

    def expects(self, key: Key) -> bool:
        """Whether a learner's first word is on its way."""
        known = self._by_key.get(key)
        return known is not None and known.expected

    async def drain(self, key: Key) -> None:
        """Raises `KestrlError` if the learner does not answer."""
        known = self._by_key.get(key)
        if known is not None:
            await known.drain()

    async def close(self) -> None:
        tasks = [known.task for known in self._by_key.values()]
        for task in tasks:
            task.cancel()
        self._by_key.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
