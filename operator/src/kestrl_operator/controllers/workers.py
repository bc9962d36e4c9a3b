"""The workers of all controllers: each takes the next job that is due, runs its pass and returns it to its queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kestrl.errors import KestrlError
from kestrl_operator.controllers.controller import Controller
from kestrl_operator.controllers.installations import ClaimedJobs
from kestrl_operator.state.jobs import Key

log = logging.getLogger(__name__)
PASS_SECONDS = 120.0
"""Maximum seconds of one pass. Every call within it has a shorter time-out, so this ends passes that hang for an
unforeseen reason."""
REPORT_SECONDS = 15.0
"""Maximum seconds to report a failed pass."""
REPORT_AFTER_FAILURES = 3
"""Consecutive failed passes of a job before its status reports them; fewer are considered transient."""


class ControllerWorkers:
    """The workers.

    Args:
        measure: Called with the seconds of each pass.
    """

    def __init__(self, measure: Callable[[float], None]) -> None:
        self._measure = measure
        self.passes: Counter[str] = Counter()
        """Ended passes: `ok`, `failed`, `bug`."""

    async def run(self, controllers: Sequence[Controller]) -> None:
        """Reconciles every job once, then each job that changes, until cancelled."""
        for controller in controllers:
            controller.add_all()
        async with asyncio.TaskGroup() as tasks:
            for controller in controllers:
                for number in range(controller.workers):
                    tasks.create_task(self._work(controller), name=f"{controller.kind.plural}-{number}")

    async def _work(self, controller: Controller) -> None:
        queue, reconciler = controller.queue, controller.reconciler
        while True:
            key = await queue.take()
            began = time.monotonic()
            try:
                async with asyncio.timeout(PASS_SECONDS):
                    requeue_after = await reconciler.reconcile(key)
            except (KestrlError, TimeoutError) as error:
                message = str(error) or f"a pass took longer than {PASS_SECONDS:g} s"
                if queue.failures(key) + 1 >= REPORT_AFTER_FAILURES:
                    await _report_failure(reconciler, key, message)
                wait = queue.failed(key)
                self.passes["failed"] += 1
                log.warning("%s: retried in %.1f s: %s", key, wait, message)
            except Exception as error:
                # A bug triggered by one job must not stop the others; it is logged with its traceback and the job is
                # retried.
                log.exception("%s: a bug", key)
                message = f"a bug in the operator, see its log: {type(error).__name__}: {error}"
                await _report_failure(reconciler, key, message)
                queue.failed(key)
                self.passes["bug"] += 1
            except BaseException:
                queue.done(key)
                raise
            else:
                self.passes["ok"] += 1
                queue.done(key, requeue_after)
            self._measure(time.monotonic() - began)


async def _report_failure(reconciler: ClaimedJobs, key: Key, message: str) -> None:
    """Reports a failed pass in the job's status; if that fails too, it is logged."""
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            await reconciler.report_failure(key, message)
    except (KestrlError, TimeoutError) as error:
        log.warning("%s: its status does not report this failure: %s: %s", key, message, error)
    except Exception:
        log.exception("%s: its status does not report this failure: %s", key, message)
