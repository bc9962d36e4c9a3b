"""The quota of SFTJobs: a Job is held without pods until Kueue has admitted the Workload of its SFTJob, and again where
the quota is taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any

from kestrl_operator.apiserver.client import Api, Conflict, Gone
from kestrl_operator.apiserver.kinds import BATCH_JOB, SFT_JOB
from kestrl_operator.controllers.quota import KueueQuota, QuotaMemory
from kestrl_operator.render.quota import SFT_POD_SET, holding, resuming, sft_request, unplaced_form
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import FINISHED, PRIORITY_LABEL, Quota, QuotaHolder, QuotaUse
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.sft import BatchJob, SFTPod, SFTStore
from kestrl_operator.state.snapshot import QUEUE_LABEL
from kestrl_operator.status.sft import SFTSnapshot, end_of

log = logging.getLogger(__name__)
Object = dict[str, Any]


class SFTQuota:
    """The Workloads of SFTJobs, and what their Jobs do with the answers.

    Args:
        api: Connection to the API server.
        store: What the streams delivered.
    """

    def __init__(self, api: Api, store: SFTStore) -> None:
        self._api, self._store = api, store
        self._quota, self._memories = KueueQuota(api, store.workload), dict[Key, QuotaMemory]()

    def forget(self, key: Key) -> None:
        """Forgets a job."""
        self._memories.pop(key, None)

    def is_finished(self, key: Key, uid: str) -> bool:
        """Whether a job that has ended holds no quota."""
        admission = self._store.admission(key, uid)
        return admission is None or admission.has(FINISHED)

    async def settle(
        self, key: Key, raw: Mapping[str, Any], snapshot: SFTSnapshot, batch: BatchJob
    ) -> tuple[SFTSnapshot, float | None]:
        """Asks Kueue for quota and does as it answers.

        Args:
            key: Namespace and name of the job.
            raw: The job object.
            snapshot: What was observed of Job and pods.
            batch: The Job, which Kueue's own integration of Jobs has no part in.

        Returns:
            The snapshot with the answer, and the seconds until a refused Workload is written again.

        Raises:
            ApiProblem: The API server did not do what was asked.
        """
        memory = self._memories.setdefault(key, QuotaMemory())
        use = self._use(key, raw, snapshot, batch, memory)
        if use.quota is None:
            await self._let_run(key, batch, snapshot.pods, None)
            return snapshot, None
        seconds = await self._quota.carry_out(memory, use)
        if use.quota.suffices:
            await self._quota.look_up_places(memory, use.quota.admission)
            await self._let_run(key, batch, snapshot.pods, memory.places.get(SFT_POD_SET))
        elif use.quota.request is None:
            await self._let_run(key, batch, snapshot.pods, None)
        elif not batch.suspended:
            log.info("%s: its Job is suspended, since the job has not the quota that it needs", key)
            await self._change(key, batch, holding(batch.unplaced or unplaced_form(batch.template)))
        return replace(snapshot, use=self._use(key, raw, snapshot, batch, memory)), seconds

    async def finish(self, key: Key, raw: Mapping[str, Any], pods: Sequence[SFTPod]) -> None:
        """Has the quota of a job that has ended given back, if its pods have, too.

        Raises:
            ApiProblem: The API server did not do what was asked.
        """
        metadata = raw["metadata"]
        use = QuotaUse(
            holder=QuotaHolder(kind=SFT_JOB.name, key=key, uid=metadata["uid"]),
            now=time(),
            queue=metadata.get("labels", {}).get(QUEUE_LABEL, ""),
            quota=Quota(request=None, admission=self._store.admission(key, metadata["uid"])),
            occupied=any(not pod.over for pod in pods),
            ready=False,
            end=end_of(raw["status"]),
        )
        await self._quota.carry_out(QuotaMemory(), use)

    def _use(
        self, key: Key, raw: Mapping[str, Any], snapshot: SFTSnapshot, batch: BatchJob, memory: QuotaMemory
    ) -> QuotaUse:
        """What the job does with its quota. Its request is what its Job was created with, which never changes."""
        uid, labels = raw["metadata"]["uid"], raw["metadata"].get("labels", {})
        admission, request = self._store.admission(key, uid), None
        if snapshot.queue:
            unplaced = batch.unplaced or unplaced_form(batch.template)
            request = sft_request(unplaced, snapshot.queue, labels.get(PRIORITY_LABEL, ""))
        is_needed = request is not None or admission is not None
        return QuotaUse(
            holder=QuotaHolder(kind=SFT_JOB.name, key=key, uid=uid),
            now=time(),
            queue=snapshot.queue,
            quota=Quota(request=request, admission=admission, refused=memory.refused) if is_needed else None,
            # Until Kubernetes has noticed that the Job is suspended, it may create a pod.
            occupied=any(not pod.over for pod in snapshot.pods) or not (batch.suspended and batch.stopped),
            ready=batch.running and not batch.suspended,
        )

    async def _let_run(self, key: Key, batch: BatchJob, pods: Sequence[SFTPod], place: Placement | None) -> None:
        """Resumes a Job that the operator holds, when no pod is there any more."""
        is_held = batch.suspended and batch.stopped
        if batch.unplaced is None or not is_held or any(not pod.over for pod in pods):
            return
        log.info("%s: its Job is resumed", key)
        if batch.started is not None:  # Kubernetes changes the place of no Job that says that it has started
            try:
                await self._api.merge_status(BATCH_JOB, key.namespace, batch.name, batch.version, {"startTime": None})
            except (Gone, Conflict):
                return
        await self._change(key, batch, resuming(batch.template, batch.unplaced, place))

    async def _change(self, key: Key, batch: BatchJob, changes: Object) -> None:
        """Changes the Job; if it is gone, its event causes another pass."""
        changes = {**changes, "metadata": {**changes.get("metadata", {}), "uid": batch.uid}}
        try:
            await self._api.merge(BATCH_JOB, key.namespace, batch.name, changes)
        except (Gone, Conflict):
            return
