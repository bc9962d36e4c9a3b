"""One pass over one SFTJob: observe, create its Job once, write the status. SFTJobs are changed nowhere else.

Level-based as passes over AgentRLJobs are. Kubernetes' Job controller restarts the pod; its pods are few and are listed
in the pass instead of being watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any

from kestrl._shared.spec.sft import SFTJob
from kestrl.errors import UserInputError
from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import BATCH_JOB, KUEUE_WORKLOAD, OLD_EVENT, POD, SFT_JOB
from kestrl_operator.controllers.applier import APPLY_CONFLICT
from kestrl_operator.controllers.claims import CLAIMED, REFUSED, Foreign, claim
from kestrl_operator.controllers.sft_manifests import SFTManifests
from kestrl_operator.controllers.sft_quota import SFTQuota
from kestrl_operator.events import Events
from kestrl_operator.render.sft import batch_name
from kestrl_operator.state.accelerators import Node
from kestrl_operator.state.chart_values import Cluster
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.sft import SFT_LABEL, SFTPod, SFTStore, batch_of, owner_uid, sft_pod_of
from kestrl_operator.state.snapshot import QUEUE_LABEL, UID_LABEL
from kestrl_operator.status.build import without_empties, written
from kestrl_operator.status.conditions import QUARANTINED
from kestrl_operator.status.sft import SFTSnapshot, has_ended, sft_status, with_sft_failure
from kestrl_operator.work import quarantine
from kestrl_operator.work.work_record import WorkRecord

log = logging.getLogger(__name__)
Object = dict[str, Any]
WAITING_SECONDS, RUNNING_SECONDS = 10.0, 60.0
"""Seconds until the next pass over a job whose pod does not run yet, of which no watch event reports anything, and over
one whose pod runs."""
REFUSED_SECONDS = 30.0
"""Seconds until a refused object is tried again: a quota or an admission webhook may have changed."""


class SFTReconciler:
    """Reconciles all SFTJobs of this operator.

    Args:
        api: Connection to the API server.
        store: What the streams delivered.
        events: Publishes events.
        cluster: The administrator's settings.
        work_record: Record of the job that code runs on.
        nodes: The nodes as last listed; None where this operator may not list them.
        kueue: Whether jobs that name a queue ask Kueue for quota by a Workload of their own.
    """

    def __init__(
        self,
        api: Api,
        store: SFTStore,
        events: Events,
        cluster: Cluster,
        work_record: WorkRecord,
        nodes: Callable[[], Sequence[Node] | None],
        *,
        kueue: bool = False,
    ) -> None:
        self._api, self._store, self._events, self._kueue = api, store, events, kueue
        self._manifests, self._work_record, self._nodes = SFTManifests(cluster, kueue=kueue), work_record, nodes
        self._quota = SFTQuota(api, store)

    async def reconcile(self, key: Key) -> float | None:
        """Runs one pass; returns the seconds after which another is due without an event.

        Raises:
            ApiProblem: The API server did not do what was asked; the caller retries later.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self._quota.forget(key)
            return None
        if has_ended(raw.get("status", {})):
            return await self._after_the_end(key, raw)
        if quarantine.is_quarantined(raw, self._work_record.killed_by):
            message = quarantine.message(raw)
            if message:
                await self._write_failure(key, raw, message, QUARANTINED)
            return None
        queue = raw["metadata"].get("labels", {}).get(QUEUE_LABEL, "")
        snapshot = SFTSnapshot(generation=raw["metadata"].get("generation", 0), now=written(time()), queue=queue)
        try:
            with self._work_record.on(raw):
                job, objects = self._rendered(key, raw)
        except UserInputError as error:
            return await self._write(key, raw, replace(snapshot, problem=str(error)), None)
        refused = await self._ensure(key, raw["metadata"]["uid"], objects)
        with self._work_record.on(raw):
            nodes = self._nodes()
            message = "" if nodes is None else self._manifests.unsatisfiable(job, nodes)
        retry_seconds = REFUSED_SECONDS if refused else WAITING_SECONDS
        return await self._write(key, raw, replace(snapshot, problem=refused, unsatisfiable=message), retry_seconds)

    def leave(self, key: Key) -> None:
        """Leaves a job to another installation."""
        self._quota.forget(key)

    async def report_failure(self, key: Key, message: str) -> None:
        """Writes into a job's status that a pass over it failed.

        Raises:
            ApiProblem: The API server refuses that as well.
        """
        raw = self._store.jobs.get(key)
        if raw is not None:
            await self._write_failure(key, raw, message, "OperatorFailed")

    def _rendered(self, key: Key, raw: Mapping[str, Any]) -> tuple[SFTJob, list[Object]]:
        """The job and its objects; raises `UserInputError`."""
        metadata, job = raw["metadata"], self._manifests.read(key, raw)
        uid, labels = metadata["uid"], metadata.get("labels", {})
        existing_batch = self._store.batch_of(key, uid)
        storage = "" if existing_batch is None else batch_of(existing_batch).storage
        return job, self._manifests.objects(key, uid, job, labels=labels, storage=storage)

    async def _ensure(self, key: Key, uid: str, objects: Sequence[Object]) -> str:
        """Applies what the pod needs and creates the Job, unless it exists; returns what Kubernetes refuses.

        The Job is created and never changed: Kubernetes keeps its pod template as it is.
        """
        *needed, batch = objects
        existing_batch = self._store.batch_of(key, uid)
        if existing_batch is not None and (batch_of(existing_batch).outcome or batch_of(existing_batch).running):
            return ""
        refused: list[str] = []
        for item in needed:
            try:
                if item["kind"] in CLAIMED:
                    await self._api.apply(await claim(self._api, item, has_begun=existing_batch is not None))
                else:
                    await self._api.apply(item, force=False)
            except Gone:
                raise
            except Foreign as error:
                refused.append(str(error))
            except ApiProblem as error:
                if error.status not in REFUSED and APPLY_CONFLICT not in str(error):
                    raise
                refused.append(str(error))
        if existing_batch is None and not refused:
            refused += await self._create(key, uid, batch)
        if not refused:
            return ""
        log.warning("%s: retried in %.0f s: %s", key, REFUSED_SECONDS, refused[0])
        return f"Kubernetes refuses an object of this job: {'; '.join(refused)}"

    async def _create(self, key: Key, uid: str, batch: Object) -> list[str]:
        """Creates the Job; returns what Kubernetes refuses."""
        try:
            self._store.batch(await self._api.create(BATCH_JOB, batch))
        except Conflict:
            existing = await self._api.get(BATCH_JOB, batch["metadata"]["name"], key.namespace)
            if owner_uid(existing) != uid:
                name = batch["metadata"]["name"]
                return [f"there is a Job {name} that is not this job's; delete it, or wait until it is deleted"]
            self._store.batch(existing)
        except Gone:
            raise
        except ApiProblem as error:
            if error.status not in REFUSED:
                raise
            return [str(error)]
        return []

    async def _write(
        self, key: Key, raw: Mapping[str, Any], snapshot: SFTSnapshot, retry_seconds: float | None
    ) -> float | None:
        """Observes Job and pods, and writes the status; returns the seconds until the next pass.

        Args:
            key: Namespace and name of the job.
            raw: The job object.
            snapshot: What was observed so far.
            retry_seconds: Seconds until the next pass if the pod neither runs nor has ended.
        """
        existing_batch = self._store.batch_of(key, raw["metadata"]["uid"])
        batch = None if existing_batch is None else batch_of(existing_batch)
        pods = [] if batch is None else await self._pods(key, raw["metadata"]["uid"], batch.uid)
        is_expected = batch is not None and not (pods or batch.outcome or batch.suspended)
        not_created = await self._not_created(key) if is_expected else ""
        snapshot = replace(snapshot, batch=batch, pods=pods, not_created=not_created)
        quota_seconds = None
        if batch is not None and self._kueue and not batch.queue and not batch.outcome:
            snapshot, quota_seconds = await self._quota.settle(key, raw, snapshot, batch)
        with self._work_record.on(raw):
            status = sft_status(raw.get("status", {}), snapshot)
        await self._publish(key, raw, status)
        if batch is not None and batch.outcome:
            return None  # the event of the status causes another pass
        if any(pod.running for pod in pods) and batch is not None and not batch.suspended:
            retry_seconds = RUNNING_SECONDS
        return min((seconds for seconds in (retry_seconds, quota_seconds) if seconds is not None), default=None)

    async def _pods(self, key: Key, uid: str, batch: str) -> list[SFTPod]:
        """Pods of the SFTJob with this uid: of its Job, and of one that was deleted while its pod ran."""
        return [
            sft_pod_of(item)
            async for item in self._api.list(POD, key.namespace, labels=f"{SFT_LABEL}={key.name}")
            if item["metadata"]["labels"].get(UID_LABEL) == uid
            or any(owner["uid"] == batch for owner in item["metadata"].get("ownerReferences", ()))
        ]

    async def _after_the_end(self, key: Key, raw: Mapping[str, Any]) -> float | None:
        """Has the quota of a job that has ended given back when its pods have."""
        uid = raw["metadata"]["uid"]
        self._quota.forget(key)
        if self._quota.is_finished(key, uid):
            return None
        batch = self._store.batch_of(key, uid)
        pods = await self._pods(key, uid, "" if batch is None else batch["metadata"]["uid"])
        await self._quota.finish(key, raw, pods)
        return WAITING_SECONDS

    async def _not_created(self, key: Key) -> str:
        """Why Kubernetes creates no pod of the Job, as its latest event says; empty if none does."""
        cause = ""
        async for item in self._api.list(OLD_EVENT, key.namespace, fields={"reason": "FailedCreate"}):
            if item["involvedObject"].get("name", "") == batch_name(key.name):
                cause = item.get("message", "")
        return cause

    async def _write_failure(self, key: Key, raw: Mapping[str, Any], message: str, reason: str) -> None:
        snapshot = SFTSnapshot(generation=raw["metadata"].get("generation", 0), now=written(time()), problem=message)
        await self._publish(key, raw, with_sft_failure(raw.get("status", {}), snapshot, reason))

    async def _publish(self, key: Key, raw: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Writes the status if it differs, and events for what has changed in it."""
        before, after, metadata = raw.get("status", {}), without_empties(status), raw["metadata"]
        if after == before:
            return
        try:
            updated_job = await self._api.apply_status(
                key.namespace, key.name, int(metadata["resourceVersion"]), after, kind=SFT_JOB
            )
        except (Gone, Conflict):
            return  # deleted or changed meanwhile: its watch event causes another pass
        self._store.job(updated_job)
        await self._events.publish(key, metadata["uid"], before, after, kind=SFT_JOB)


async def list_sft(api: Api, store: SFTStore, namespaces: Sequence[str], *, kueue: bool) -> set[Key]:
    """Lists SFTJobs, their Jobs and Workloads, and hands what the streams missed to the store; returns the keys of the
    SFTJobs concerned.

    Raises:
        ApiProblem: The API server does not answer.
    """
    known_uids, present_uids, missed = store.known(), set[str](), set[Key]()
    kinds = [(SFT_JOB, "", store.job), (BATCH_JOB, SFT_LABEL, store.batch)]
    if kueue:
        kinds.append((KUEUE_WORKLOAD, SFT_LABEL, store.workload))
    for namespace in namespaces or (None,):
        for kind, labels, take in kinds:
            marks = [mark async for mark in api.marks(kind, namespace, labels=labels)]
            present_uids.update(mark.uid for mark in marks)
            if all(store.version(mark.uid) >= mark.version for mark in marks):
                continue  # whole objects are listed only where one is newer
            async for item in api.list(kind, namespace, labels=labels):
                key = take(item)
                if key is not None:
                    missed.add(key)
    return missed | set(store.forget(known_uids - present_uids))
