"""Running jobs that lack pods: why, as Kubernetes' controllers tell in events alone, and when all is applied anew for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kestrl_operator.api import OLD_EVENT, Api
from kestrl_operator.cluster import replicas, workload
from kestrl_operator.observe import Snapshot
from kestrl_operator.policies import lacking
from kestrl_operator.render.job import ROLES
from kestrl_operator.store import Key

ASKING_SECONDS = 15.0
"""Pods are made in less; then it is asked why there are too few, and now and then again."""
MEND_SECONDS = 60.0
"""Pods start in less; then all is applied anew, and again later and later, as an object that is not watched may be missing."""


class Lack(NamedTuple):
    """A running job with too few pods."""

    since: float
    asked: float
    told: str
    """Why, as far as events tell."""


class Lacks:
    """Of all jobs."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lacking: dict[Key, Lack] = {}
        self._mended: dict[Key, float] = {}
        """When all was applied anew."""

    def forget(self, key: Key) -> None:
        self._lacking.pop(key, None)
        self._mended.pop(key, None)

    async def unmade(self, key: Key, seen: Snapshot) -> tuple[float, str] | None:
        """Since when pods of a running job are not even made, and why; None while they are, or nobody knows why not.

        Raises:
            ApiProblem: The apiserver does not tell.
        """
        running = seen.job is not None and any(item.replicas for item in seen.workloads.values())
        if seen.job is None or not running or len(seen.staying) >= sum(replicas(seen.job.spec).values()):
            self._lacking.pop(key, None)
            return None
        lack = self._lacking.setdefault(key, Lack(seen.now, seen.now, ""))
        if seen.now >= lack.asked + ASKING_SECONDS:
            lack = self._lacking[key] = Lack(lack.since, seen.now, await self._why(key))
        return (lack.since, lack.told) if lack.told else None

    async def _why(self, key: Key) -> str:
        told = ""
        names = tuple(workload(key.name, role) for role in ROLES)
        async for item in self._api.list(OLD_EVENT, key.namespace, fields={"reason": "FailedCreate"}):
            if item["involvedObject"].get("name", "").startswith(names):
                told = f"{item['involvedObject']['name']}: {item.get('message', '')}"
        return told

    def until_mended(self, key: Key, seen: Snapshot) -> float | None:
        """Seconds until all is to be applied anew, since pods do not start; None if they do."""
        since = lacking(seen)
        if since is None:
            self._mended.pop(key, None)
            return None
        last = max(since, self._mended.get(key, since))
        return max(0.0, last + max(MEND_SECONDS, last - since) - seen.now)

    def mended(self, key: Key, seen: Snapshot) -> None:
        """All is applied anew now."""
        self._mended[key] = seen.now

    def waits(self, key: Key, seen: Snapshot) -> Iterator[float]:
        """Seconds after which time alone calls for another look."""
        if key in self._lacking:
            yield ASKING_SECONDS
        mended = self.until_mended(key, seen)
        if mended is not None:
            yield mended
