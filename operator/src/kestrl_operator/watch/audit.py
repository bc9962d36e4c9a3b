"""Stale watch detection: all objects are listed periodically and compared with what the watch streams delivered.

A stream that froze behind a load balancer looks exactly like a quiet one. Whatever the list finds missing is delivered
at once. A change that a stream still has not delivered by the next audit makes the watch stale; the liveness probe then
fails, and the kubelet restarts the operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial

from kestrl_operator.apiserver.client import Api, Mark, Object
from kestrl_operator.apiserver.kinds import BATCH_JOB, JOB, NODE, POD, SFT_JOB, Kind
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.parsing import node_of
from kestrl_operator.state.sft import SFT_LABEL
from kestrl_operator.state.store import JOB_LABEL, Store
from kestrl_operator.watch.streams import MANAGED, WATCHED

log = logging.getLogger(__name__)
PODS_EVERY = 5
"""Audits between two lists of pods and other objects, which are more numerous than jobs; every audit lists them while
a stream has not delivered some."""
OF_JOBS = f"{MANAGED},!{SFT_LABEL}"
"""Labels of the objects of AgentRLJobs."""
NO_CHILDREN = frozenset({JOB, POD, SFT_JOB, BATCH_JOB})


class Audit:
    """Compares lists with what the streams delivered, and keeps the result."""

    def __init__(
        self,
        api: Api,
        store: Store,
        namespaces: tuple[str, ...],
        changed: Callable[[Key], None],
        child: Callable[[Kind, Object], None],
        kinds: Iterable[Kind] = WATCHED,
    ) -> None:
        """Prepares the audit; nothing is listed yet.

        Args:
            api: Connection to the API server.
            store: Objects that the streams delivered.
            namespaces: Namespaces to list; empty for all.
            changed: Called for a job whose change the stream has not delivered.
            child: Called with an object of a job whose change the stream has not delivered, as the stream would call
                it.
            kinds: The kinds that are watched.
        """
        self._owned_kinds = tuple(kind for kind in kinds if kind not in NO_CHILDREN)
        self._api, self._store, self._changed, self._child = api, store, changed, child
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._expected: dict[str, int] = {}
        """Versions of jobs, by uid, that the stream had not delivered at the last audit."""
        self._received: dict[str, int] = {}
        self._unconfirmed: set[str] = set()
        """Uids of objects that a list had and that no stream has delivered. A stream that begins after their deletion
        never mentions them."""
        self._rounds = 0
        self.stale: list[str] = []
        """Jobs whose changes the stream has not delivered for a whole interval."""
        self.done = asyncio.Event()
        """Set after the first audit, when the store is complete."""
        self.ended = 0.0
        """When the last audit ended, by the loop's clock."""

    def received(self, uid: str, version: int) -> None:
        """Records a job version that the stream delivered."""
        self._received[uid] = max(version, self._received.get(uid, 0))

    def confirm(self, uid: str) -> None:
        """Records an object of any kind that a stream delivered, which delivers its deletion as well."""
        self._unconfirmed.discard(uid)

    @property
    def repeats_soon(self) -> bool:
        """Whether the next audit is to follow soon: streams that begin while the first one lists miss deletions."""
        return self._rounds == 1 and bool(self._unconfirmed)

    async def once(self, *, nodes: bool) -> None:
        """Lists all objects, and hands on what the streams missed.

        Args:
            nodes: Whether nodes are listed, too.

        Raises:
            ApiProblem: The API server does not answer.
        """
        await self._jobs()
        if self._rounds % PODS_EVERY == 0 or self._unconfirmed:
            await self._pods()
            await self._children()
        if nodes:
            await self._nodes()
        self._rounds += 1
        self.ended = asyncio.get_running_loop().time()
        self.done.set()

    async def _nodes(self) -> None:
        before = self._store.lost_nodes().keys()
        self._store.nodes = [node_of(item) async for item in self._api.list(NODE, None)]
        for key in list(self._store.on_nodes(before ^ self._store.lost_nodes().keys())):
            self._changed(key)

    async def _jobs(self) -> None:
        # Jobs that the stream delivers while the list is read may be too new to be in it; their absence is no deletion.
        known_uids, received_before = self._store.known().jobs, frozenset(self._received)
        expected, late, present_uids = dict[str, int](), list[str](), set[str]()
        for mark in await self._look(JOB, "", self._missed_job):
            present_uids.add(mark.uid)
            received = self._received.get(mark.uid, 0)
            if received < mark.version:
                expected[mark.uid] = mark.version
            if received < self._expected.get(mark.uid, 0):
                late.append(f"{mark.namespace}/{mark.name}")
        self._forget(known_uids - present_uids)
        for uid in received_before - present_uids:
            del self._received[uid]
        if late:
            log.error("stale watch: no events for %s during a whole audit interval", ", ".join(late[:5]))
        self._expected, self.stale = expected, late

    async def _pods(self) -> None:
        known_uids = self._store.known().pods
        present_uids = {mark.uid for mark in await self._look(POD, JOB_LABEL, self._missed_pod)}
        self._forget(known_uids - present_uids)

    async def _children(self) -> None:
        known_uids, present_uids = self._store.known().children, set[str]()
        for kind in self._owned_kinds:
            present_uids.update(mark.uid for mark in await self._look(kind, OF_JOBS, partial(self._child, kind)))
        self._forget(known_uids - present_uids)

    async def _look(self, kind: Kind, labels: str, missed: Callable[[Object], None]) -> list[Mark]:
        """Name and version of all objects of a kind. Those newer than in the store are handed to `missed`.

        Whole objects are listed only where one is newer: usually none is, and reading all pods of a thousand jobs to
        find that out would be most of an operator's work.
        """
        marks: list[Mark] = []
        for namespace in self._namespaces:
            page_marks = [mark async for mark in self._api.marks(kind, namespace, labels=labels)]
            marks += page_marks
            if all(self._store.version(mark.uid) >= mark.version for mark in page_marks):
                continue
            async for item in self._api.list(kind, namespace, labels=labels):
                uid = item["metadata"]["uid"]
                known_version = self._store.version(uid)
                if known_version < int(item["metadata"]["resourceVersion"]):
                    if not known_version:
                        self._unconfirmed.add(uid)
                    missed(item)
        return marks

    def _missed_job(self, item: Object) -> None:
        self._changed(self._store.job(item))

    def _missed_pod(self, item: Object) -> None:
        key = self._store.pod(item)
        if key is not None:
            self._changed(key)

    def _forget(self, uids: Collection[str]) -> None:
        self._unconfirmed.difference_update(uids)
        for key in self._store.forget(uids):
            self._changed(key)
