"""Whether the watch streams still tell the truth: now and then everything is listed and compared with what they told.

A stream that froze behind a load balancer looks exactly like a quiet one. The list mends what was missed at once; and what a stream
still has not told by the next audit makes the operator deaf, which its liveness probe says, so that the kubelet starts it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kestrl_operator.api import DEPLOYMENT, JOB, NODE, POD, STATEFUL_SET, Api
from kestrl_operator.observe import node_of
from kestrl_operator.reconcile import Reconciler
from kestrl_operator.shell import MANAGED
from kestrl_operator.store import JOB_LABEL, Key, Store

log = logging.getLogger(__name__)
PODS_EVERY = 5
"""Pods are more than jobs, so they are listed at every fifth audit only."""


class Audit:
    """The comparison, and what it has found."""

    def __init__(
        self,
        api: Api,
        store: Store,
        namespaces: tuple[str, ...],
        changed: Callable[[Key], None],
        *,
        may_list_nodes: bool,
    ) -> None:
        self._api, self._store, self._changed = api, store, changed
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._may_list_nodes = may_list_nodes
        self._owed: dict[str, int] = {}
        """Versions of jobs that the stream had not told of at the last audit, by uid."""
        self._heard: dict[str, int] = {}
        self._rounds = 0
        self.deaf: list[str] = []
        """Jobs that the stream has not told of for a whole interval."""
        self.done = asyncio.Event()
        """Set after the first: from then on all is known."""
        self.ended = 0.0
        """When the last audit ended, by the loop's clock."""

    def heard(self, uid: str, version: int) -> None:
        """The stream told of a job."""
        self._heard[uid] = max(version, self._heard.get(uid, 0))

    async def once(self, reconciler: Reconciler) -> None:
        """Lists, compares, mends. Raises `ApiProblem` if the apiserver does not answer."""
        await self._jobs()
        if self._rounds % PODS_EVERY == 0:
            await self._pods()
            await self._workloads()
        if self._may_list_nodes:
            reconciler.nodes = [node_of(item) async for item in self._api.list(NODE, None)]
        self._rounds += 1
        self.ended = asyncio.get_running_loop().time()
        self.done.set()

    async def _jobs(self) -> None:
        owed: dict[str, int] = {}
        present: set[Key] = set()
        late: list[str] = []
        for namespace in self._namespaces:
            async for item in self._api.list(JOB, namespace):
                uid, version = item["metadata"]["uid"], int(item["metadata"]["resourceVersion"])
                behind = self._store.version(uid) < version
                key = self._store.job(item)
                present.add(key)
                if behind:
                    self._changed(key)
                if self._heard.get(uid, 0) < version:
                    owed[uid] = version
                if uid in self._owed and self._heard.get(uid, 0) < self._owed[uid]:
                    late.append(str(key))
        for key in self._store.keep_jobs(present):
            self._changed(key)
        known = {self._store.jobs[key]["metadata"]["uid"] for key in present if key in self._store.jobs}
        self._heard = {uid: version for uid, version in self._heard.items() if uid in known}
        if late:
            log.error("the watch has not told of %s for a whole audit's interval", ", ".join(late[:5]))
        self._owed, self.deaf = owed, late

    async def _pods(self) -> None:
        present: set[str] = set()
        for namespace in self._namespaces:
            async for item in self._api.list(POD, namespace, labels=JOB_LABEL):
                present.add(item["metadata"]["uid"])
                behind = self._store.version(item["metadata"]["uid"]) < int(item["metadata"]["resourceVersion"])
                key = self._store.pod(item)
                if behind and key is not None:
                    self._changed(key)
        for key in self._store.keep_pods(present):
            self._changed(key)

    async def _workloads(self) -> None:
        for namespace in self._namespaces:
            for kind in (STATEFUL_SET, DEPLOYMENT):
                async for item in self._api.list(kind, namespace, labels=MANAGED):
                    key = self._store.workload(item)
                    if key is not None:
                        self._changed(key)
