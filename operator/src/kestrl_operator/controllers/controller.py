"""One controller for each kind of job: what it watches, what it knows, and what brings its jobs to their state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrl_operator.apiserver.kinds import Kind
from kestrl_operator.controllers.installations import ClaimedJobs
from kestrl_operator.state.jobs import JobObjects, Key
from kestrl_operator.work.workqueue import Queue

Object = Mapping[str, Any]
JobQueue = Queue[Key]
Take = Callable[[Kind, Object, bool], Key | None]
"""Stores an object of an event, deleted or not; returns the job that needs a pass, if any does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A kind of job, and its passes."""

    kind: Kind
    watched: frozenset[Kind]
    """The kind itself, and what belongs to its jobs."""
    store: JobObjects
    take: Take
    reconciler: ClaimedJobs
    workers: int
    """Jobs that are reconciled at the same time."""
    queue: JobQueue = field(default_factory=JobQueue)
    list_missed: Callable[[], Awaitable[Collection[Key]]] | None = None
    """Lists the jobs and returns those of which the streams missed something; None where the audit does."""

    def receive(self, kind: Kind, body: Object, deleted: bool) -> None:
        """Handles an event of a watch stream, if it is of a watched kind."""
        if kind in self.watched and (key := self.take(kind, body, deleted)) is not None:
            self.queue.add(key)

    async def add_missed(self) -> None:
        """Queues the jobs of which the streams missed something.

        Raises:
            ApiProblem: The API server does not answer.
        """
        for key in () if self.list_missed is None else await self.list_missed():
            self.queue.add(key)

    def add_all(self) -> None:
        """Queues every job."""
        for key in self.store.jobs:
            self.queue.add(key)
