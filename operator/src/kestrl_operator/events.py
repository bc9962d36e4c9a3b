"""Kubernetes events: one for each condition that changes to a listed reason, with that reason, and single ones."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import EVENT, JOB, Kind
from kestrl_operator.state.jobs import Key
from kestrl_operator.status.conditions import LOST, Type

log = logging.getLogger(__name__)
REMEMBERED = 2000
LONGEST_NOTE = 1000
PUBLISHED: Mapping[Type, Mapping[str, str]] = {
    Type.ACCEPTED: {"Invalid": "Warning", "Unresolvable": "Warning"},
    Type.SCHEDULED: {"PodsScheduled": "Normal", "Unsatisfiable": "Warning"},
    Type.ENGINES_READY: {"AllReady": "Normal", "Unavailable": "Warning", **dict.fromkeys(LOST, "Warning")},
    Type.POLICY_CONVERGED: {"Quarantined": "Warning"},
    Type.ROLLOUTS_FLOWING: dict.fromkeys(("NoWorker", "Failing", *LOST), "Warning"),
    Type.LEARNER_PROGRESSING: dict.fromkeys(
        ("StorageUnavailable", "Stalled", "Unavailable", "Failed", *LOST), "Warning"
    ),
    Type.CHECKPOINT_DURABLE: {"StorageFailed": "Warning"},
    Type.REWARD_HEALTHY: {"JudgeFailing": "Warning", "Degenerate": "Warning"},
    Type.TOOLS_HEALTHY: {"NoToolCall": "Warning", "CallsFailing": "Warning"},
    Type.LEARNED: dict.fromkeys(("NoToolCall", "NoRewardSpread", "ZeroGradient", "WeightsUnchanged"), "Warning"),
    Type.TRACKED: {"Failing": "Warning"},
    Type.SUSPENDED: {"Draining": "Normal", "Released": "Normal"},
    Type.READY: {"OperatorFailed": "Warning", "Quarantined": "Warning"},
    Type.SUCCEEDED: {
        "Completed": "Normal", "LearnerFailed": "Warning", "BackoffExceeded": "Warning", "DeadlineExceeded": "Warning",
        "PendingTooLong": "Warning",
    },
}  # fmt: skip
"""Conditions and reasons whose start is published, with the event type."""


class Notice(NamedTuple):
    """An event to publish."""

    kind: str
    """Normal or Warning."""
    reason: str
    note: str


def notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Notice]:
    """The events for the difference between two statuses. Pure."""
    old = {item["type"]: item["reason"] for item in before.get("conditions", ())}
    for item in after.get("conditions", ()):
        kind = PUBLISHED.get(item["type"], {}).get(item["reason"])
        if kind is not None and old.get(item["type"]) != item["reason"]:
            yield Notice(kind, item["reason"], item.get("message") or f"{item['type']}: {item['reason']}")


class Events:
    """Publishes events; the same event again is counted in its series."""

    def __init__(self, api: Api, instance: str) -> None:
        self._api, self._instance = api, instance
        self._published: OrderedDict[str, int] = OrderedDict()

    async def publish(
        self, key: Key, uid: str, before: Mapping[str, Any], after: Mapping[str, Any], *, kind: Kind = JOB
    ) -> None:
        """Publishes the events for the difference between two statuses of a job."""
        for notice in notices(before, after):
            await self.announce(key, uid, notice, kind=kind)

    async def announce(self, key: Key, uid: str, notice: Notice, *, kind: Kind = JOB) -> None:
        """Publishes an event regarding a job. An event that cannot be written is logged and fails no pass."""
        log.info("%s: %s: %s", key, notice.reason, notice.note)
        try:
            await self._publish(kind, key, uid, notice)
        except ApiProblem as error:
            log.warning("%s: event %s was not written: %s", key, notice.reason, error)

    async def _publish(self, kind: Kind, key: Key, uid: str, notice: Notice) -> None:
        # Kubernetes does not allow changes to an event's note: another note is another event.
        digest = hashlib.sha256(f"{uid}/{notice.reason}/{notice.note}".encode()).hexdigest()[:16]
        name = f"{key.name}.{digest}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._published[name] = await self._write(
            key, self._event(kind, key, uid, name, notice, now), self._published.get(name, 0) + 1
        )
        self._published.move_to_end(name)
        while len(self._published) > REMEMBERED:
            self._published.popitem(last=False)

    async def _write(self, key: Key, event: Mapping[str, Any], times: int) -> int:
        """Creates the event, or increases its count; returns the new count."""
        if times > 1:
            try:
                await self._count(key, event, times)
            except Gone:
                times = 1  # Kubernetes keeps an event for about an hour
            else:
                return times
        try:
            await self._api.create(EVENT, event)
        except Conflict:
            # The previous leader has published it.
            await self._count(key, event, times := 2)
        return times

    async def _count(self, key: Key, event: Mapping[str, Any], times: int) -> None:
        changes = {"series": {"count": times, "lastObservedTime": event["eventTime"]}}
        await self._api.merge(EVENT, key.namespace, event["metadata"]["name"], changes)

    def _event(self, kind: Kind, key: Key, uid: str, name: str, notice: Notice, now: str) -> dict[str, Any]:
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": key.namespace},
            "eventTime": now,
            "reportingController": "kestrl.dev/operator",
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "type": notice.kind,
            "reason": notice.reason,
            "note": notice.note[:LONGEST_NOTE],
            "regarding": {
                "apiVersion": kind.api_version,
                "kind": kind.name,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
            },
        }
