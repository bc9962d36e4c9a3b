"""Writes the status of jobs, and the events for what has changed in it. Statuses are written nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import time
from typing import Any

from kestrl_operator.apiserver.client import Api, Conflict, Gone
from kestrl_operator.controllers.job_state import JobState
from kestrl_operator.events import Events
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Snapshot
from kestrl_operator.state.store import Store
from kestrl_operator.status.build import states_in, with_failure, without_empties

NUMBERS_SECONDS = 25.0
"""Minimum seconds between two writes of a status of which only numbers have changed: less than between two such
reports, so that each is written when it comes."""
CONFLICT_RECHECK_SECONDS = 5.0
"""Seconds until the next pass over a job that changed while its status was computed, if no watch event causes one."""


class StatusWriter:
    """Writes a status for the resourceVersion that it was computed from."""

    def __init__(self, api: Api, store: Store, events: Events) -> None:
        self._api, self._store, self._events = api, store, events

    async def write(self, key: Key, snapshot: Snapshot, status: Mapping[str, Any]) -> bool:
        """Writes the status if it differs; False if the job has changed meanwhile."""
        try:
            await self._write(key, snapshot.uid, snapshot.status, without_empties(status))
        except Conflict:
            return False
        return True

    async def write_due(self, state: JobState, snapshot: Snapshot, status: Mapping[str, Any]) -> float | None:
        """Writes the status if a state in it differs, or a number and the last ones are old enough; returns the seconds
        after which it is to be computed again, None if that is not necessary.
        """
        after, now = without_empties(status), asyncio.get_running_loop().time()
        if after == snapshot.status:
            return None
        seconds_left = state.numbers_due - now
        if seconds_left > 0 and states_in(after) == states_in(snapshot.status):
            return seconds_left
        if not await self.write(state.key, snapshot, status):
            return CONFLICT_RECHECK_SECONDS
        state.numbers_due = now + NUMBERS_SECONDS
        return None

    async def write_failure(
        self, key: Key, raw: Mapping[str, Any], message: str, reason: str = "OperatorFailed"
    ) -> None:
        """Writes a failure into condition Ready, beside what was observed before.

        Raises:
            ApiProblem: The API server refuses that as well.
        """
        metadata, before = raw["metadata"], raw.get("status", {})
        status = with_failure(before, message, generation=metadata.get("generation", 0), now=time(), reason=reason)
        await self._write(key, metadata["uid"], before, without_empties(status))

    async def job_exists(self, key: Key, snapshot: Snapshot) -> bool:
        """Whether the job still exists: its present status is written again."""
        try:
            await self._api.apply_status(key.namespace, key.name, self._store.version(snapshot.uid), snapshot.status)
        except Gone:
            return False
        return True

    async def _write(self, key: Key, uid: str, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        version = self._store.version(uid)
        if status == before or not version:
            return
        self._store.expect(uid, status)
        try:
            self._store.job(await self._api.apply_status(key.namespace, key.name, version, status))
        except Gone:
            return  # deleted meanwhile
        await self._events.publish(key, uid, before, status)
