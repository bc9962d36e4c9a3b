"""Writes the Workload by which a job asks Kueue for quota, and reads where Kueue wants the job's pods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import KUEUE_WORKLOAD, RESOURCE_FLAVOR, WORKLOAD_PRIORITY
from kestrl_operator.controllers.claims import REFUSED, Foreign
from kestrl_operator.render.quota import merged, workload_object
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import (
    QuotaHolder,
    QuotaRequest,
    QuotaUse,
    WorkloadAdmission,
    absent_priority_class,
)
from kestrl_operator.status.quota import QuotaStep, finished, quota_step, released, started

log = logging.getLogger(__name__)
RETRY_SECONDS = 15.0
"""Seconds until a Workload that was refused is written again."""


@dataclass(slots=True)
class QuotaMemory:
    """What is remembered of a job's quota between passes."""

    refused: str = ""
    """Why its Workload could not be written at the last try."""
    places: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    """Where its last admission wants its pods, by pod set."""
    placed: object = None
    """What in its Workload the places follow from."""


class KueueQuota:
    """The Workloads of jobs of a kind, and the places of their pods.

    Args:
        api: Connection to the API server.
        keep: Called with each Workload that was written.
    """

    def __init__(self, api: Api, keep: Callable[[Mapping[str, Any]], object]) -> None:
        self._api, self._keep = api, keep

    async def look_up_places(self, memory: QuotaMemory, admission: WorkloadAdmission | None) -> None:
        """Reads where Kueue wants the pods of a job that holds quota. Without any, they stay where they were.

        Raises:
            ApiProblem: A ResourceFlavor cannot be read.
        """
        if admission is None or not admission.flavors:
            return
        admitted = (admission.uid, admission.flavors, admission.updates)
        if memory.placed == admitted:
            return
        places: dict[str, Placement] = {}
        for pod_set, names in admission.flavors.items():
            flavors = [await self._flavor(name) for name in names]
            place = merged([*flavors, *admission.updates.get(pod_set, ())])
            if any(place):
                places[pod_set] = place
        memory.places, memory.placed = places, admitted

    async def _flavor(self, name: str) -> Placement:
        spec = (await self._api.get(RESOURCE_FLAVOR, name)).get("spec", {})
        return Placement(spec.get("nodeLabels") or {}, spec.get("tolerations") or ())

    async def carry_out(self, memory: QuotaMemory, use: QuotaUse) -> float | None:
        """Makes the next change of the job's Workload; returns the seconds until it is tried again, if it was refused.

        Raises:
            ApiProblem: The API server failed for another reason.
        """
        step, quota = quota_step(use), use.quota
        if quota is not None and quota.request is not None and step is QuotaStep.APPLY:
            return await self._apply(memory, use.holder, quota.request, is_new=quota.admission is None)
        memory.refused = ""
        if quota is not None and quota.admission is not None and step is not None:
            await self._change(use, quota.admission, step)
        return None

    async def _apply(
        self, memory: QuotaMemory, holder: QuotaHolder, request: QuotaRequest, *, is_new: bool
    ) -> float | None:
        refusal = memory.refused
        memory.refused = await self._refusal(holder, request, is_new=is_new)
        if not memory.refused:
            return None
        if memory.refused != refusal:
            log.warning("%s: retried in %.0f s: %s", holder.key, RETRY_SECONDS, memory.refused)
        return RETRY_SECONDS

    async def _refusal(self, holder: QuotaHolder, request: QuotaRequest, *, is_new: bool) -> str:
        """Writes the Workload; returns why it cannot be, empty if it was written."""
        try:
            priority = None if not request.priority_class else await self._priority(request.priority_class)
        except Gone:
            return absent_priority_class(request.priority_class)
        body = workload_object(holder, request, priority)
        if is_new and await self._is_taken(holder):
            return str(Foreign(body))
        try:
            self._keep(await self._api.apply(body))
        except Gone:
            raise
        except ApiProblem as error:
            if error.status not in REFUSED:
                raise
            return str(error)
        return ""

    async def _priority(self, name: str) -> int:
        return int((await self._api.get(WORKLOAD_PRIORITY, name))["value"])

    async def _is_taken(self, holder: QuotaHolder) -> bool:
        """Whether a Workload of the job's name for it is there that is not the job's."""
        try:
            existing = await self._api.get(KUEUE_WORKLOAD, holder.name, holder.key.namespace)
        except Gone:
            return False
        return all(owner["uid"] != holder.uid for owner in existing["metadata"].get("ownerReferences", ()))

    async def _change(self, use: QuotaUse, admission: WorkloadAdmission, step: QuotaStep) -> None:
        """Deletes the Workload or changes its status. If it has changed meanwhile, its event causes another pass."""
        key = use.holder.key
        if step is QuotaStep.DELETE:
            log.info("%s: Workload %s is deleted, since the job needs no quota as it asks for", key, admission.name)
            await self._api.delete(KUEUE_WORKLOAD, key.namespace, admission.name, uid=admission.uid)
            return
        log.info("%s: Workload %s: %s", key, admission.name, step)
        status = _status(admission, use, step)
        try:
            body = await self._api.merge_status(
                KUEUE_WORKLOAD, key.namespace, admission.name, admission.version, status
            )
        except (Conflict, Gone):
            return
        self._keep(body)


def _status(admission: WorkloadAdmission, use: QuotaUse, step: QuotaStep) -> Mapping[str, Any]:
    """The status of a Workload after a step that changes it."""
    if step is QuotaStep.RELEASE:
        return released(admission, use.now)
    return finished(admission, use) if step is QuotaStep.FINISH else started(admission, use.now)
