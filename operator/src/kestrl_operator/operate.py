"""The operator as a whole: watch always, write only while leading."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from kestrl.errors import KestrlError
from kestrl.telemetry.metrics import observe
from kestrl.telemetry.names import Metric
from kestrl_operator import health, shell
from kestrl_operator.api import JOB, MANAGER, POD, Api, ApiProblem, Kind
from kestrl_operator.at_work import AtWork
from kestrl_operator.audit import Audit
from kestrl_operator.checks import preflight
from kestrl_operator.config import Config
from kestrl_operator.events import Events
from kestrl_operator.follow import Followers
from kestrl_operator.lease import Lease
from kestrl_operator.reconcile import Reconciler
from kestrl_operator.store import WORKLOADS, Key, Store
from kestrl_operator.work import Queue

log = logging.getLogger(__name__)
LONGEST_PASS = 120.0
"""Seconds of one pass: every call within has a shorter time-out, so this ends what hangs for a reason nobody thought of."""
REMEMBERED_CHANGES = 10_000
TELLING = 15.0
"""Seconds for telling of a pass that failed."""
TOLD_FROM = 3
"""An apiserver that fails so many passes of a job one after another is told of in its status; before, it is a hiccup."""


class Operator:
    """One process of it."""

    def __init__(self, config: Config, api: Api) -> None:
        self._config, self._api = config, api
        self._identity = os.environ.get("POD_NAME", f"{os.uname().nodename}-{os.getpid()}")
        self._store, self._queue = Store(), Queue[Key]()
        self._followers = Followers(self._queue.add)
        self._at_work = AtWork(config.work_file)
        events = Events(api, self._identity)
        self._reconciler = Reconciler(
            api, self._store, self._followers, events, config.jobs, config.key(), self._at_work
        )
        self._changes: OrderedDict[str, str] = OrderedDict()
        self._passes: Counter[str] = Counter()
        self._watch = shell.Watch(self._take, config.namespaces)
        self._lease = Lease(
            api,
            namespace=config.lease.namespace,
            name=config.lease.name,
            identity=self._identity,
            seconds=config.lease.seconds,
        )

    async def run(self) -> None:
        """Until SIGTERM.

        Raises:
            UserInputError: The cluster lacks something, or a port is taken.
            ApiProblem: The apiserver does not answer at the start.
        """
        may_list_nodes = await preflight(self._api, self._config)
        self._audit = Audit(
            self._api,
            self._store,
            self._config.namespaces,
            self._queue.add,
            lambda kind, given: self._take(kind, given, deleted=False),
            may_list_nodes=may_list_nodes,
        )
        self._observe()
        probes = await health.serve(self._config.health_listen, alive=self._wrong, ready=self._missing)
        watching = asyncio.create_task(self._watch.run(), name="watch")
        auditing = asyncio.create_task(self._keep_auditing(), name="audit")
        leading = asyncio.create_task(self._lease.hold(self._lead), name="lead")
        told_to_go = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, told_to_go.set)
        stopping = asyncio.create_task(told_to_go.wait(), name="stop-signal")
        try:
            done, _ = await asyncio.wait([watching, auditing, leading, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._watch.stop()
            for task in (auditing, leading, stopping):
                task.cancel()
            await asyncio.wait([auditing, leading, stopping])
            # The lease first: whoever waits for it need not wait for the streams to close.
            await self._lease.release()
            await self._followers.close()
            await asyncio.wait([watching])
            await probes.cleanup()
            self._at_work.close()

    def _take(self, kind: Kind, given: Mapping[str, Any], deleted: bool) -> None:
        """An event of a watch stream."""
        if kind == JOB:
            before = self._generation(given)
            key: Key | None = self._store.job(given, deleted=deleted)
            if self._generation(given) != before:
                self._queue.forgive(key)
            self._audit.heard(given["metadata"]["uid"], int(given["metadata"]["resourceVersion"]))
        elif kind == POD:
            key = self._store.pod(given, deleted=deleted)
        else:
            key = self._take_ours(kind, given, deleted)
        if key is not None:
            self._queue.add(key)

    def _generation(self, given: Mapping[str, Any]) -> tuple[str, int] | None:
        """Which job is known by a name, and which spec of it."""
        metadata = self._store.jobs.get(Key(given["metadata"]["namespace"], given["metadata"]["name"]), {}).get(
            "metadata"
        )
        return None if metadata is None else (metadata["uid"], metadata.get("generation", 0))

    def _take_ours(self, kind: Kind, given: Mapping[str, Any], deleted: bool) -> Key | None:
        """What we applied, as somebody changed it: a deletion, or a generation that no apply of ours made."""
        key = self._store.child(kind.name, given, deleted=deleted)
        if key is None:
            return None
        touched = deleted or self._touched(given["metadata"]["uid"], changed_by_another(given))
        if touched:
            self._reconciler.drifted(key)
        return key if touched or kind.name in WORKLOADS else None

    def _touched(self, uid: str, mark: str) -> bool:
        """Whether somebody else changed an object since it was looked at last; a change that stands is answered once."""
        if not mark or self._changes.get(uid) == mark:
            return False
        self._changes[uid] = mark
        while len(self._changes) > REMEMBERED_CHANGES:
            self._changes.popitem(last=False)
        return True

    async def _keep_auditing(self) -> None:
        while True:
            try:
                await self._audit.once(self._reconciler)
                wait = self._config.audit_seconds
            except ApiProblem as error:
                log.warning("%s", error)
                wait = self._config.audit_seconds / 10
            await asyncio.sleep(wait * random.uniform(0.9, 1.1))  # noqa: S311 - so that replicas do not ask together

    async def _lead(self) -> None:
        """Everything is looked at once, then whatever changes."""
        await self._audit.done.wait()
        for key in self._store.jobs:
            self._queue.add(key)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._config.workers):
                tasks.create_task(self._work(), name=f"worker-{number}")

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                async with asyncio.timeout(LONGEST_PASS):
                    look_again = await self._reconciler.reconcile(key)
            except (KestrlError, TimeoutError) as error:
                why = str(error) or f"a pass took longer than {LONGEST_PASS:g} s"
                if self._queue.failures(key) + 1 >= TOLD_FROM:
                    await self._tell(key, why)
                wait = self._queue.failed(key)
                self._passes["failed"] += 1
                log.warning("%s: looked at again in %.1f s: %s", key, wait, why)
            except Exception as error:
                # A bug of ours with one job must not take all others down; it is told with its traceback and tried again.
                log.exception("%s: a bug", key)
                await self._tell(key, f"a bug of the operator's, its log has more: {type(error).__name__}: {error}")
                self._queue.failed(key)
                self._passes["bug"] += 1
            except BaseException:
                self._queue.done(key)
                raise
            else:
                self._passes["ok"] += 1
                self._queue.done(key, look_again)

    async def _tell(self, key: Key, why: str) -> None:
        """Tells of a pass that failed where the person who can act looks; what keeps that from being told is logged."""
        try:
            async with asyncio.timeout(TELLING):
                await self._reconciler.tell_of_failure(key, why)
        except (KestrlError, TimeoutError) as error:
            log.warning("%s: its status does not tell that %s: %s", key, why, error)
        except Exception:
            log.exception("%s: its status does not tell that %s", key, why)

    def _wrong(self) -> str:
        """Why this process should be started again."""
        if self._audit.deaf:
            return f"deaf: the watch does not tell of {', '.join(self._audit.deaf[:3])}"
        return ""

    def _missing(self) -> str:
        """Why it is not ready."""
        if not self._audit.done.is_set():
            return "the first list is not done"
        return "" if self._watch.begun.is_set() else "the watch has not begun"

    def _observe(self) -> None:
        loop = asyncio.get_running_loop()
        observe(Metric.RECONCILES, lambda: self._passes)
        observe(Metric.OPERATOR_QUEUE, lambda: len(self._queue))
        observe(Metric.OPERATOR_LEADER, lambda: int(self._lease.leading))
        observe(Metric.OPERATOR_REQUESTS, lambda: self._api.requests)
        observe(Metric.OPERATOR_FOLLOWED, lambda: len(self._followers))
        observe(Metric.WATCH_AGE, lambda: loop.time() - self._audit.ended)
        observe(Metric.OPERATOR_DEAF, lambda: len(self._audit.deaf))
        observe(Metric.OPERATOR_JOBS, self._phases)

    def _phases(self) -> dict[str, int]:
        phases = Counter(
            job.get("status", {}).get("shown", {}).get("phase") or "New" for job in list(self._store.jobs.values())
        )
        return dict(phases)


def changed_by_another(given: Mapping[str, Any]) -> str:
    """A mark of the last change to an object's spec by somebody but us; empty when there was none. Pure.

    Kubernetes' own controllers write status and annotations of ours, never the spec. A change by way of the scale subresource has no
    time, so the generation is part of the mark.
    """
    metadata = given["metadata"]
    foreign = sorted(
        f"{entry.get('manager')}/{entry.get('subresource', '')}/{entry.get('time', '')}"
        for entry in metadata.get("managedFields", ())
        if entry.get("manager") != MANAGER
        and entry.get("subresource") != "status"
        and "f:spec" in entry.get("fieldsV1", {})
    )
    return f"{metadata.get('generation', '')} {' '.join(foreign)}" if foreign else ""
