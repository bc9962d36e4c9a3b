"""Whether the watch streams still tell the truth: now and then everything is listed and compared with what they told.

A stream that froze behind a load balancer looks exactly like a quiet one. The list mends what was missed at once; and what a stream
still has not told by the next audit makes the operator deaf, which its liveness probe says, so that the kubelet starts it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from kestrl_operator.api import JOB, NODE, POD, Api, Kind, Mark, Object
from kestrl_operator.observe import node_of
from kestrl_operator.reconcile import Reconciler
from kestrl_operator.shell import MANAGED, WATCHED
from kestrl_operator.store import JOB_LABEL, Key, Store

log = logging.getLogger(__name__)
PODS_EVERY = 5
"""Pods, and what else a job has, are more than jobs, so they are listed at every fifth audit only."""
CHILDREN = tuple(kind for kind in WATCHED if kind not in {JOB, POD})


class Audit:
    """The comparison, and what it has found."""

    def __init__(
        self,
        api: Api,
        store: Store,
        namespaces: tuple[str, ...],
        changed: Callable[[Key], None],
        child: Callable[[Kind, Object], None],
        *,
        may_list_nodes: bool,
    ) -> None:
        """Nothing is listed yet.

        Args:
            api: Asked.
            store: Compared with.
            namespaces: None means all.
            changed: Called for a job that the stream was late to tell of.
            child: Called with an object of a job that it was late to tell of, as the stream calls it.
            may_list_nodes: Whether nodes are listed, too.
        """
        self._api, self._store, self._changed, self._child = api, store, changed, child
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
            await self._children()
        if self._may_list_nodes:
            reconciler.nodes = [node_of(item) async for item in self._api.list(NODE, None)]
        self._rounds += 1
        self.ended = asyncio.get_running_loop().time()
        self.done.set()

    async def _jobs(self) -> None:
        # What the stream tells while the list is read may be too new to be in it, and is no reason to forget anything.
        known, heard_before = self._store.known().jobs, frozenset(self._heard)
        owed, late, present = dict[str, int](), list[str](), set[str]()
        for mark in await self._look(JOB, "", self._missed_job):
            present.add(mark.uid)
            heard = self._heard.get(mark.uid, 0)
            if heard < mark.version:
                owed[mark.uid] = mark.version
            if heard < self._owed.get(mark.uid, 0):
                late.append(f"{mark.namespace}/{mark.name}")
        self._forget(known - present)
        for uid in heard_before - present:
            del self._heard[uid]
        if late:
            log.error("the watch has not told of %s for a whole audit's interval", ", ".join(late[:5]))
        self._owed, self.deaf = owed, late

    async def _pods(self) -> None:
        known = self._store.known().pods
        present = {mark.uid for mark in await self._look(POD, JOB_LABEL, self._missed_pod)}
        self._forget(known - present)

    async def _children(self) -> None:
        known, present = self._store.known().children, set[str]()
        for kind in CHILDREN:
            present.update(mark.uid for mark in await self._look(kind, MANAGED, partial(self._child, kind)))
        self._forget(known - present)

    async def _look(self, kind: Kind, labels: str, missed: Callable[[Object], None]) -> list[Mark]:
        """Name and version of all there are of a kind. What is newer than what is known is handed to `missed`.

        Whole objects are listed only where something is: at rest nothing is, and to read all pods of a thousand jobs to see that would
        be most of what an operator does.
        """
        marks: list[Mark] = []
        for namespace in self._namespaces:
            here = [mark async for mark in self._api.marks(kind, namespace, labels=labels)]
            marks += here
            if all(self._store.version(mark.uid) >= mark.version for mark in here):
                continue
            async for item in self._api.list(kind, namespace, labels=labels):
                if self._store.version(item["metadata"]["uid"]) < int(item["metadata"]["resourceVersion"]):
                    missed(item)
        return marks

    def _missed_job(self, item: Object) -> None:
        self._changed(self._store.job(item))

    def _missed_pod(self, item: Object) -> None:
        key = self._store.pod(item)
        if key is not None:
            self._changed(key)

    def _forget(self, gone: Collection[str]) -> None:
        for key in self._store.forget(gone):
            self._changed(key)
