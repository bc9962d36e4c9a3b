"""Leader election with a coordination.k8s.io Lease, held by one operator at a time.

Whether a lease has expired is measured with the local clock, from when this process saw the record change; the clocks
of two machines are never compared. A leader that cannot renew stops leading before another may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import LEASE
from kestrl_operator.apiserver.lease_age import LeaseAge

log = logging.getLogger(__name__)
RENEW_SHARE, GIVE_UP_SHARE = 0.2, 0.66
"""Shares of the lease's duration: the interval of renewals, and the time without a renewal after which a leader
stops."""
NO_ANSWER = "no answer in time"


class LeaderElection:
    """The election from the view of one process."""

    def __init__(self, api: Api, *, namespace: str, name: str, identity: str, seconds: float) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._identity, self._seconds = identity, seconds
        self._age = LeaseAge(seconds)
        self.leading = False
        self.renewed = 0.0
        """When the lease was last renewed or looked at, by the loop's clock."""

    async def hold(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Waits until this process is the leader, runs `lead` while it is, and waits again when it no longer is. Ends
        when `lead` does.

        Raises:
            Any exception that `lead` raises.
        """
        while True:
            await self._win()
            leading = asyncio.ensure_future(lead())
            keeping = asyncio.create_task(self._keep(), name="keep-lease")
            try:
                await asyncio.wait([leading, keeping], return_when=asyncio.FIRST_COMPLETED)
                self.leading = False
                if leading.done():
                    return await leading
                log.error("%s is lost: nothing is written until it is acquired again", self._name)
            finally:
                self.leading = False
                for task in (leading, keeping):
                    task.cancel()
                await asyncio.wait([leading, keeping])

    async def release(self) -> None:
        """Releases the lease, so that another process can lead at once. If that fails, the others wait for the lease's
        duration, so this call takes no longer than that.
        """
        try:
            async with asyncio.timeout(self._seconds):
                record = await self._api.get(LEASE, self._name, self._namespace)
                if record["spec"].get("holderIdentity") == self._identity:
                    await self._write(record, holder="")
        except (ApiProblem, TimeoutError) as error:
            log.warning("the lease was not released: %s", str(error) or NO_ANSWER)

    async def _win(self) -> None:
        while not await self._tried():  # noqa: ASYNC110 - there is no event for another machine's release
            await asyncio.sleep(self._seconds * RENEW_SHARE)
        self.leading = True
        log.info("%s leads", self._identity)

    async def _keep(self) -> None:
        """Renews the lease until it is lost or has not been renewed for too long; a renewal without an answer waits no
        longer either.
        """
        loop = asyncio.get_running_loop()
        pause, give_up_seconds = self._seconds * RENEW_SHARE, self._seconds * GIVE_UP_SHARE
        while (seconds_left := self.renewed + give_up_seconds - loop.time()) > 0:
            await asyncio.sleep(min(pause, seconds_left))
            try:
                async with asyncio.timeout_at(self.renewed + give_up_seconds):
                    is_holder = await self._attempt()
            except (ApiProblem, TimeoutError) as error:
                log.warning("the lease cannot be renewed: %s", str(error) or NO_ANSWER)
                continue
            if not is_holder:
                return

    async def _tried(self) -> bool:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._attempt()
        except (ApiProblem, TimeoutError) as error:
            log.warning("the lease cannot be acquired: %s", str(error) or NO_ANSWER)
            return False

    async def _attempt(self) -> bool:
        """Takes or renews the lease if it is free or held by this process; returns whether it is held now."""
        began = asyncio.get_running_loop().time()
        try:
            record = await self._api.get(LEASE, self._name, self._namespace)
        except Gone:
            record = self._empty()
        held_by_other = self._look(record)
        if held_by_other:
            self.renewed = began
            return False
        try:
            new_record = await self._write(record, holder=self._identity)
        except Conflict:
            return False
        self._look(new_record)
        self.renewed = began
        return True

    def _look(self, record: dict[str, Any]) -> bool:
        """Whether another process holds it: its record changed less than a lease's duration ago, by the local clock."""
        holder, fresh = record.get("spec", {}).get("holderIdentity") or "", self._age.is_fresh(record)
        return bool(holder) and holder != self._identity and fresh

    def _empty(self) -> dict[str, Any]:
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {},
        }

    async def _write(self, record: dict[str, Any], *, holder: str) -> dict[str, Any]:
        old = record.get("spec", {})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changed = old.get("holderIdentity") != holder
        spec = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "renewTime": now,
            "acquireTime": now if changed else old.get("acquireTime", now),
            "leaseTransitions": old.get("leaseTransitions", 0) + int(changed and bool(holder)),
        }
        new_record = {**record, "spec": spec}
        if "resourceVersion" in record["metadata"]:
            return await self._api.replace(LEASE, new_record)
        return await self._api.create(LEASE, new_record)
