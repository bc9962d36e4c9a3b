"""The operator process: always watches, writes only while it is the leader."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kestrl.errors import KestrlError
from kestrl_operator import health, metrics
from kestrl_operator.apiserver.client import Api, ApiProblem
from kestrl_operator.apiserver.kinds import BATCH_JOB, JOB, POD, SFT_JOB, Kind
from kestrl_operator.apiserver.leader_election import LeaderElection
from kestrl_operator.config import OperatorConfig
from kestrl_operator.controllers.installations import ClaimedJobs, Installations
from kestrl_operator.controllers.job_state import JobStates
from kestrl_operator.controllers.reconcile import Reconciler
from kestrl_operator.controllers.sft_reconcile import SFTReconciler, list_sft
from kestrl_operator.events import Events
from kestrl_operator.preflight import preflight
from kestrl_operator.state.sft import SFTStore
from kestrl_operator.state.store import WORKLOADS, Key, Store
from kestrl_operator.watch import streams as watch
from kestrl_operator.watch.audit import Audit
from kestrl_operator.watch.drift import Drift
from kestrl_operator.work.work_record import WorkRecord
from kestrl_operator.work.workqueue import Queue

log = logging.getLogger(__name__)
PASS_SECONDS = 120.0
"""Maximum seconds of one pass. Every call within it has a shorter time-out, so this ends passes that hang for an
unforeseen reason."""
SFT_WORKERS = 2
"""SFTJobs that are reconciled concurrently."""
REPORT_SECONDS = 15.0
"""Maximum seconds to report a failed pass."""
REPORT_AFTER_FAILURES = 3
"""Consecutive failed passes of a job before its status reports them; fewer are considered transient."""


class Operator:
    """One operator process."""

    def __init__(self, config: OperatorConfig, api: Api) -> None:
        self._config, self._api = config, api
        self._identity = os.environ.get("POD_NAME", f"{os.uname().nodename}-{os.getpid()}")
        self._store, self._queue = Store(), Queue[Key]()
        self._states = JobStates(self._queue.add)
        self._work_record = WorkRecord(config.work_file)
        events, lease = Events(api, self._identity), config.lease
        self._installations = Installations(
            api, events, namespace=lease.namespace, name=lease.name, seconds=lease.seconds
        )
        reconciler = Reconciler(api, self._store, self._states, events, config.jobs, config.key(), self._work_record)
        self._reconciler = ClaimedJobs(self._installations, JOB, self._store, reconciler)
        self._sft_store, self._sft_queue = SFTStore(), Queue[Key]()
        sft = SFTReconciler(api, self._sft_store, events, config.jobs, self._work_record, lambda: self._store.nodes)
        self._sft = ClaimedJobs(self._installations, SFT_JOB, self._sft_store, sft)
        self._drift = Drift()
        self._passes: Counter[str] = Counter()
        self._measure = metrics.pass_seconds()
        self._watch = watch.WatchThread(self._take, config.namespaces)
        self._audit = Audit(
            api,
            self._store,
            config.namespaces,
            self._queue.add,
            lambda kind, body: self._take(kind, body, deleted=False),
        )
        self._election = LeaderElection(
            api,
            namespace=lease.namespace,
            name=lease.name,
            identity=self._identity,
            seconds=lease.seconds,
        )

    async def run(self) -> None:
        """Runs until SIGTERM.

        Raises:
            UserInputError: The cluster is missing something the operator needs, or a port is in use.
            ApiProblem: The API server does not answer at the start.
        """
        may_list_nodes = await preflight(self._api, self._config)
        self._register_metrics()
        probes = await health.serve(
            self._config.health_listen, alive=self._unhealthy_reason, ready=self._not_ready_reason
        )
        watching = asyncio.create_task(self._watch.run(), name="watch")
        auditing = asyncio.create_task(self._keep_auditing(nodes=may_list_nodes), name="audit")
        leading = asyncio.create_task(self._election.hold(self._lead), name="lead")
        stop_requested = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, stop_requested.set)
        stopping = asyncio.create_task(stop_requested.wait(), name="stop-signal")
        try:
            finished_tasks, _ = await asyncio.wait(
                [watching, auditing, leading, stopping], return_when=asyncio.FIRST_COMPLETED
            )
            for task in finished_tasks:
                task.result()
        finally:
            self._watch.stop()
            for task in (auditing, leading, stopping):
                task.cancel()
            await asyncio.wait([auditing, leading, stopping])
            # The lease first: the next leader need not wait for the streams to close.
            await self._election.release()
            await self._states.close()
            await asyncio.wait([watching])
            await probes.cleanup()
            self._work_record.close()

    def _take(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> None:
        """Handles an event of a watch stream."""
        if kind == JOB:
            key = self._take_job(body, deleted)
        elif kind in {SFT_JOB, BATCH_JOB}:
            self._take_sft(kind, body, deleted)
            return
        elif kind == POD:
            key = self._store.pod(body, deleted=deleted)
        else:
            key = self._take_child(kind, body, deleted)
        if key is not None:
            self._queue.add(key)

    def _take_job(self, body: Mapping[str, Any], deleted: bool) -> Key | None:
        """Handles a change of a job; None for a state that needs no pass, such as one that a pass has written."""
        expected, before = not deleted and self._store.expects(body), self._generation(body)
        key = self._store.job(body, deleted=deleted)
        if self._generation(body) != before:
            self._queue.forgive(key)
        self._audit.received(body["metadata"]["uid"], int(body["metadata"]["resourceVersion"]))
        return None if expected else key

    def _take_sft(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> None:
        """Handles a change of an SFTJob or of its Job."""
        take = self._sft_store.job if kind == SFT_JOB else self._sft_store.batch
        key = take(body, deleted=deleted)
        if key is not None:
            self._sft_queue.add(key)

    def _generation(self, body: Mapping[str, Any]) -> tuple[str, int] | None:
        """The uid and generation of the job that is known by this name."""
        metadata = self._store.jobs.get(Key(body["metadata"]["namespace"], body["metadata"]["name"]), {}).get(
            "metadata"
        )
        return None if metadata is None else (metadata["uid"], metadata.get("generation", 0))

    def _take_child(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> Key | None:
        """Handles a change of an applied object: a deletion, or a change of its spec by another manager."""
        key = self._store.child(kind.name, body, deleted=deleted)
        if key is None:
            return None
        touched = deleted or self._drift.is_new(body)
        if touched:
            self._states.mark_drifted(key)
        return key if touched or kind.name in WORKLOADS else None

    async def _keep_auditing(self, *, nodes: bool) -> None:
        while True:
            try:
                for key in await list_sft(self._api, self._sft_store, self._config.namespaces):
                    self._sft_queue.add(key)
                await self._audit.once(nodes=nodes)
                wait = self._config.audit_seconds
            except ApiProblem as error:
                log.warning("%s", error)
                wait = self._config.audit_seconds / 10
            await asyncio.sleep(wait * random.uniform(0.9, 1.1))  # noqa: S311 - spreads the replicas' lists

    async def _lead(self) -> None:
        """Reconciles every job once, then each job that changes."""
        await self._audit.done.wait()
        for key in self._store.jobs:
            self._queue.add(key)
        for key in self._sft_store.jobs:
            self._sft_queue.add(key)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._config.workers):
                tasks.create_task(self._work(self._queue, self._reconciler), name=f"worker-{number}")
            for number in range(SFT_WORKERS):
                tasks.create_task(self._work(self._sft_queue, self._sft), name=f"sft-worker-{number}")

    async def _work(self, queue: Queue[Key], reconciler: ClaimedJobs) -> None:
        while True:
            key = await queue.take()
            began = time.monotonic()
            try:
                async with asyncio.timeout(PASS_SECONDS):
                    requeue_after = await reconciler.reconcile(key)
            except (KestrlError, TimeoutError) as error:
                message = str(error) or f"a pass took longer than {PASS_SECONDS:g} s"
                if queue.failures(key) + 1 >= REPORT_AFTER_FAILURES:
                    await self._report_failure(reconciler, key, message)
                wait = queue.failed(key)
                self._passes["failed"] += 1
                log.warning("%s: retried in %.1f s: %s", key, wait, message)
            except Exception as error:
                # A bug triggered by one job must not stop the others; it is logged with its traceback and the job is
                # retried.
                log.exception("%s: a bug", key)
                message = f"a bug in the operator, see its log: {type(error).__name__}: {error}"
                await self._report_failure(reconciler, key, message)
                queue.failed(key)
                self._passes["bug"] += 1
            except BaseException:
                queue.done(key)
                raise
            else:
                self._passes["ok"] += 1
                queue.done(key, requeue_after)
            self._measure(time.monotonic() - began)

    async def _report_failure(self, reconciler: ClaimedJobs, key: Key, message: str) -> None:
        """Reports a failed pass in the job's status; if that fails too, it is logged."""
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await reconciler.report_failure(key, message)
        except (KestrlError, TimeoutError) as error:
            log.warning("%s: its status does not report this failure: %s: %s", key, message, error)
        except Exception:
            log.exception("%s: its status does not report this failure: %s", key, message)

    def _unhealthy_reason(self) -> str:
        """Why this process should be restarted; empty if it is healthy."""
        if self._audit.stale:
            return f"stale watch: no events for {', '.join(self._audit.stale[:3])}"
        return ""

    def _not_ready_reason(self) -> str:
        """Why this process is not ready; empty if it is."""
        if not self._audit.done.is_set():
            return "the first list is not done"
        return "" if self._watch.begun.is_set() else "the watch has not started"

    def _register_metrics(self) -> None:
        stores = self._store, self._sft_store
        metrics.register(
            self._api, self._election, self._audit, self._queue, self._passes, self._states, stores, self._installations
        )
