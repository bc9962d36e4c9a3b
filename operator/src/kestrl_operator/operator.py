"""The operator process: always watches, writes only while it is the leader."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Mapping
from typing import Any

from kestrl_operator import health, metrics
from kestrl_operator.apiserver.client import Api, ApiProblem
from kestrl_operator.apiserver.kinds import JOB, Kind
from kestrl_operator.apiserver.leader_election import LeaderElection
from kestrl_operator.config import OperatorConfig
from kestrl_operator.controllers.controller import Controller, JobQueue
from kestrl_operator.controllers.installations import ClaimedJobs, Installations
from kestrl_operator.controllers.job_events import JobEvents
from kestrl_operator.controllers.job_state import JobStates
from kestrl_operator.controllers.reconcile import Reconciler
from kestrl_operator.controllers.sft_controller import WATCHED as SFT_WATCHED
from kestrl_operator.controllers.sft_controller import sft_controller
from kestrl_operator.controllers.workers import ControllerWorkers
from kestrl_operator.events import Events
from kestrl_operator.preflight import preflight
from kestrl_operator.state.store import Store
from kestrl_operator.watch import streams as watch
from kestrl_operator.watch.audit import Audit
from kestrl_operator.work.work_record import WorkRecord

log = logging.getLogger(__name__)


class Operator:
    """One operator process."""

    def __init__(self, config: OperatorConfig, api: Api) -> None:
        self._config, self._api = config, api
        self._identity = os.environ.get("POD_NAME", f"{os.uname().nodename}-{os.getpid()}")
        store, queue, kinds = Store(), JobQueue(), watch.watched(kueue=config.kueue)
        self._states = JobStates(queue.add)
        self._work_record = WorkRecord(config.work_file)
        events, lease = Events(api, self._identity), config.lease
        self._installations = Installations(
            api, events, namespace=lease.namespace, name=lease.name, seconds=lease.seconds
        )
        self._audit = Audit(
            api, store, config.namespaces, queue.add, lambda kind, body: self._take(kind, body, deleted=False), kinds
        )
        reconciler = Reconciler(
            api, store, self._states, events, config.jobs, config.key(), self._work_record, kueue=config.kueue
        )
        jobs = Controller(
            kind=JOB,
            watched=frozenset(kinds) - SFT_WATCHED,
            store=store,
            take=JobEvents(store, self._states, queue.forgive, self._audit.received).take,
            reconciler=ClaimedJobs(self._installations, JOB, store, reconciler),
            workers=config.workers,
            queue=queue,
        )
        sft = sft_controller(api, events, config, self._installations, self._work_record, lambda: store.nodes)
        self._store, self._controllers = store, (jobs, sft)
        self._workers = ControllerWorkers(metrics.pass_seconds())
        self._watch = watch.WatchThread(self._receive, config.namespaces, kinds)
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

    def _receive(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> None:
        """Handles an event of a watch stream."""
        self._audit.confirm(body["metadata"]["uid"])
        self._take(kind, body, deleted)

    def _take(self, kind: Kind, body: Mapping[str, Any], deleted: bool) -> None:
        """Hands on an object that a watch stream delivered or an audit found."""
        for controller in self._controllers:
            controller.receive(kind, body, deleted)

    async def _keep_auditing(self, *, nodes: bool) -> None:
        while True:
            try:
                for controller in self._controllers:
                    await controller.add_missed()
                await self._audit.once(nodes=nodes)
                wait = self._config.audit_seconds / (10 if self._audit.repeats_soon else 1)
            except ApiProblem as error:
                log.warning("%s", error)
                wait = self._config.audit_seconds / 10
            await asyncio.sleep(wait * random.uniform(0.9, 1.1))  # noqa: S311 - spreads the replicas' lists

    async def _lead(self) -> None:
        await self._audit.done.wait()
        await self._workers.run(self._controllers)

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
        metrics.register(
            self._api,
            self._election,
            self._audit,
            self._controllers,
            self._workers.passes,
            self._states,
            self._store,
            self._installations,
        )
