"""The progress stream of a learner, from which the status of its job is updated.

The operator calls the learner; a learner has no rights in the cluster. The call carries a credential that the operator
derives and that is valid for this job's learner only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import time

from kestrl._shared.backoff import Backoff
from kestrl._shared.rpc import call, channel, stream
from kestrl._shared.rpc.run_report import state_of
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl.errors import KestrlError
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import LearnerReport

log = logging.getLogger(__name__)
INTERVAL = 1.0
"""Minimum seconds between two reports."""
NUMBERS_SECONDS = 30.0
"""Minimum seconds between two reports of which only numbers have changed."""
BACKOFF = Backoff(0.5, 15.0)
"""Pauses before a learner without a stream is called again."""
FIRST_REPORT_SECONDS = 3.0
"""Seconds in which a learner that can be reached sends its first report; before that, it is not considered
unreachable."""
DRAIN_CALL_SECONDS = 10.0
PACES = 5
LARGEST_REPORT = 4 * 1024 * 1024
"""Maximum bytes of a report: a learner runs a user's job, and the operator of all jobs keeps its reports in memory."""


class LearnerStream:
    """The progress stream of one learner pod."""

    def __init__(self, key: Key, pod: str, address: str, token: str, changed: Callable[[Key], None]) -> None:
        self.key, self.pod, self.address = key, pod, address
        self._token, self._changed = token, changed
        self._paces: deque[float] = deque(maxlen=PACES)
        self._first_step: int | None = None
        """Step of the first report in phase `training`."""
        self.report: LearnerReport | None = None
        self.unreachable: str = ""
        """Why the learner does not report now; empty while it does."""
        self._tried, self._ends = False, asyncio.get_running_loop().time() + FIRST_REPORT_SECONDS
        self.task = asyncio.create_task(self._follow(), name=f"follow-{key}")

    @property
    def awaits_first_report(self) -> bool:
        """Whether neither a first report nor a failed call has been seen, and there is still time for one."""
        return not self._tried and asyncio.get_running_loop().time() < self._ends

    def _mark_unreachable(self, reason: str) -> None:
        self._tried, self.unreachable = True, reason
        self.report = None if self.report is None else replace(self.report, connected=False)
        self._changed(self.key)

    async def _follow(self) -> None:
        failures = 0
        async with channel(self.address, largest_answer=LARGEST_REPORT) as connection:
            stub = stubs.LearnerServiceStub(connection)
            request = pb.WatchProgressRequest(min_interval_seconds=INTERVAL, numbers_interval_seconds=NUMBERS_SECONDS)
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
                        self._take(state_of(report))
                        failures = 0
                    reason = "it ended the stream"
                except KestrlError as error:
                    reason = str(error)
                except Exception as error:
                    # A bug of the operator must neither look like an unreachable learner nor end the stream for good.
                    log.exception("%s: a bug while following its learner", self.key)
                    reason = f"a bug in the operator, see its log: {type(error).__name__}: {error}"
                was_reachable = not self._tried or (self.report is not None and self.report.connected)
                if was_reachable or reason != self.unreachable:
                    log.info("%s: the learner does not answer: %s", self.key, reason)
                    self._mark_unreachable(reason)
                failures += 1
                await asyncio.sleep(BACKOFF.pause(failures))

    def _take(self, state: RunState) -> None:
        now, old, steps_done, phase = time(), self.report, state.steps.done, state.activity.phase
        stepped = now if old is None else old.stepped
        if old is not None and old.state.steps.done != steps_done:
            self._paces.append(now - old.stepped)
            stepped = now
        if old is not None and old.phase is not phase:
            stepped = now
        if phase is RunPhase.TRAINING and (self._first_step is None or steps_done < self._first_step):
            self._first_step = steps_done
        self._tried, self.unreachable = True, ""
        self.report = LearnerReport(
            pod=self.pod,
            at=now,
            state=state,
            stepped=stepped,
            pace=max(self._paces, default=0.0),
            gained=0 if self._first_step is None else max(0, steps_done - self._first_step),
        )
        self._changed(self.key)

    async def drain(self) -> None:
        """Asks the learner to finish its step, checkpoint and stop.

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
