"""The number of engines of a job with a range: others move it on the StatefulSet, and the operator keeps it within."""

from __future__ import annotations

import logging

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.inference import ReplicaRange
from kestrl_operator.apiserver.client import Api, Gone
from kestrl_operator.apiserver.kinds import STATEFUL_SET
from kestrl_operator.events import Events, Notice
from kestrl_operator.state.cluster import workload
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Snapshot
from kestrl_operator.state.store import Store

log = logging.getLogger(__name__)


class EngineScale:
    """Sets the number where nobody else has, or where it is outside of the range."""

    def __init__(self, api: Api, store: Store, events: Events) -> None:
        self._api, self._store, self._events = api, store, events

    async def hand_over(self, key: Key, replicas: ReplicaRange) -> None:
        """Keeps the number that the operator has applied itself, before it applies a StatefulSet without one: the field
        would fall back to Kubernetes' default of 1.

        Raises:
            ApiProblem: The API server did not do it.
        """
        engines = self._store.workloads(key).get(Role.INFERENCE)
        if not replicas.fixed and engines is not None and engines.applied_replicas and engines.replicas > 0:
            await self._set(key, replicas.nearest(engines.replicas))

    async def keep_within(self, key: Key, snapshot: Snapshot) -> None:
        """Sets the nearest number of the range where the present one is outside of it.

        Raises:
            ApiProblem: The API server did not do it.
        """
        engines = self._store.workloads(key).get(Role.INFERENCE)
        if snapshot.job is None or engines is None or (engines.applied_replicas and engines.replicas == 0):
            return  # the last are the engines of a job that was parked, until its objects are applied again
        replicas = snapshot.job.spec.inference.replicas
        count = replicas.nearest(engines.replicas)
        if replicas.fixed or count == engines.replicas:
            return
        await self._set(key, count)
        before = snapshot.workloads.get(Role.INFERENCE)
        if before is not None and before.replicas == engines.replicas and not before.applied_replicas:
            note = (
                f"{workload(key.name, Role.INFERENCE)} had {engines.replicas} engines and is set to {count}: "
                f"spec.inference.replicas allows {replicas.min} to {replicas.max}"
            )
            await self._events.announce(key, snapshot.uid, Notice("Warning", "EnginesOutOfRange", note))

    async def _set(self, key: Key, number: int) -> None:
        name = workload(key.name, Role.INFERENCE)
        try:
            scaled = await self._api.scale(STATEFUL_SET, key.namespace, name, number)
        except Gone:
            log.info("%s: %s is gone and is not scaled", key, name)
            return
        self._store.child(STATEFUL_SET.name, scaled)
