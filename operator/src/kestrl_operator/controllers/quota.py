"""Writes the Workload by which a job asks Kueue for quota, and reads where Kueue wants the job's pods."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import JOB, KUEUE_WORKLOAD, RESOURCE_FLAVOR, WORKLOAD_PRIORITY
from kestrl_operator.controllers.claims import REFUSED, Foreign
from kestrl_operator.controllers.job_state import JobState
from kestrl_operator.render.quota import merged, workload_object
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import QuotaRequest, WorkloadAdmission, absent_priority_class
from kestrl_operator.state.snapshot import Snapshot
from kestrl_operator.state.store import Store
from kestrl_operator.status.lifecycle import Decision
from kestrl_operator.status.quota import QuotaStep, finished, quota_step, released, started

log = logging.getLogger(__name__)
RETRY_SECONDS = 15.0
"""Seconds until a Workload that was refused is written again."""


class KueueQuota:
    """The Workloads of jobs, and the places of their pods."""

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store

    async def look_up_places(self, state: JobState, admission: WorkloadAdmission | None) -> None:
        """Reads where Kueue wants the pods of a job that holds quota. Without any, they stay where they were.

        Raises:
            ApiProblem: A ResourceFlavor cannot be read.
        """
        if admission is None or not admission.flavors:
            return
        admitted = (admission.uid, admission.flavors, admission.updates)
        if state.placed == admitted:
            return
        places: dict[Role, Placement] = {}
        for pod_set, names in admission.flavors.items():
            flavors = [await self._flavor(name) for name in names]
            place = merged([*flavors, *admission.updates.get(pod_set, ())])
            if pod_set in set(Role) and any(place):
                places[Role(pod_set)] = place
        state.placements, state.placed = places, admitted

    async def _flavor(self, name: str) -> Placement:
        spec = (await self._api.get(RESOURCE_FLAVOR, name)).get("spec", {})
        return Placement(spec.get("nodeLabels") or {}, spec.get("tolerations") or ())

    async def carry_out(self, state: JobState, snapshot: Snapshot, decision: Decision) -> float | None:
        """Makes the next change of the job's Workload; returns the seconds until it is tried again, if it was refused.

        Raises:
            ApiProblem: The API server failed for another reason.
        """
        step = quota_step(snapshot, decision)
        quota = snapshot.quota
        if quota is not None and quota.request is not None and step is QuotaStep.APPLY:
            return await self._apply(state, quota.request, is_new=quota.admission is None)
        state.quota_refused = ""
        if quota is not None and quota.admission is not None and step is not None:
            await self._change(state, snapshot, decision, quota.admission, step)
        return None

    async def _apply(self, state: JobState, request: QuotaRequest, *, is_new: bool) -> float | None:
        refusal = state.quota_refused
        state.quota_refused = await self._refusal(state, request, is_new=is_new)
        if not state.quota_refused:
            return None
        if state.quota_refused != refusal:
            log.warning("%s: retried in %.0f s: %s", state.key, RETRY_SECONDS, state.quota_refused)
        return RETRY_SECONDS

    async def _refusal(self, state: JobState, request: QuotaRequest, *, is_new: bool) -> str:
        """Writes the Workload; returns why it cannot be, empty if it was written."""
        try:
            priority = None if not request.priority_class else await self._priority(request.priority_class)
        except Gone:
            return absent_priority_class(request.priority_class)
        body = workload_object(JOB.name, state.key, state.uid, request, priority)
        if is_new and await self._is_taken(state, body["metadata"]["name"]):
            return str(Foreign(body))
        try:
            self._store.child(KUEUE_WORKLOAD.name, await self._api.apply(body))
        except Gone:
            raise
        except ApiProblem as error:
            if error.status not in REFUSED:
                raise
            return str(error)
        return ""

    async def _priority(self, name: str) -> int:
        return int((await self._api.get(WORKLOAD_PRIORITY, name))["value"])

    async def _is_taken(self, state: JobState, name: str) -> bool:
        """Whether a Workload of this name is there that is not the job's."""
        try:
            existing = await self._api.get(KUEUE_WORKLOAD, name, state.key.namespace)
        except Gone:
            return False
        return all(owner["uid"] != state.uid for owner in existing["metadata"].get("ownerReferences", ()))

    async def _change(
        self, state: JobState, snapshot: Snapshot, decision: Decision, admission: WorkloadAdmission, step: QuotaStep
    ) -> None:
        """Deletes the Workload or changes its status. If it has changed meanwhile, its event causes another pass."""
        key = state.key
        if step is QuotaStep.DELETE:
            log.info("%s: Workload %s is deleted, since the job needs no quota as it asks for", key, admission.name)
            await self._api.delete(KUEUE_WORKLOAD, key.namespace, admission.name, uid=admission.uid)
            return
        log.info("%s: Workload %s: %s", key, admission.name, step)
        status = _status(admission, snapshot, decision, step)
        try:
            body = await self._api.merge_status(
                KUEUE_WORKLOAD, key.namespace, admission.name, admission.version, status
            )
        except (Conflict, Gone):
            return
        self._store.child(KUEUE_WORKLOAD.name, body)


def _status(admission: WorkloadAdmission, snapshot: Snapshot, decision: Decision, step: QuotaStep) -> Mapping[str, Any]:
    """The status of a Workload after a step that changes it."""
    if step is QuotaStep.RELEASE:
        return released(admission, snapshot.now)
    return finished(admission, snapshot, decision) if step is QuotaStep.FINISH else started(admission, snapshot.now)
