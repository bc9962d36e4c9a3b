"""Kopf as the shell: it watches, and hands every event to us; nothing is decided, stored or written by it.

Only `on.event` handlers: they keep no progress, so no annotation and no finalizer is ever put on anybody's object, and a dead operator
holds up no deletion.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import kopf
import uvloop

from kestrl.errors import KestrlError
from kestrl_operator.api import DEPLOYMENT, JOB, POD, STATEFUL_SET, Kind
from kestrl_operator.connection import log_in
from kestrl_operator.store import JOB_LABEL

Object = Mapping[str, Any]
Taken = Callable[[Kind, Object, bool], None]
"""Kind, object, and whether it was deleted."""
MANAGED = "app.kubernetes.io/managed-by=kestrl-operator"
SERVICE = Kind("", "v1", "Service", "services")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
WATCHED: Mapping[Kind, str] = {
    JOB: "",
    POD: JOB_LABEL,
    STATEFUL_SET: MANAGED,
    DEPLOYMENT: MANAGED,
    SERVICE: MANAGED,
    NETWORK_POLICY: MANAGED,
    DISRUPTION_BUDGET: MANAGED,
}
"""What is watched, and the labels that the apiserver selects by."""


class _NoDiff(kopf.DiffBaseStorage):
    """Kopf compares each object with how it saw it last, for handlers of changes. We have none, and it costs more than all else."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("there is nothing to keep of an event")


class _NoProgress(kopf.ProgressStorage):
    """Nothing of ours is ever in progress on an object: no annotation of kopf's can come to be."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("there is no progress to keep")

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def settings() -> kopf.OperatorSettings:
    """Kopf as we want it; docs/operator.md says why for each."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True  # a Lease of our own elects
    made.peering.mandatory = False
    made.posting.enabled = False  # we write few events of our own
    made.scanning.disabled = True  # no rights on CRDs and namespaces
    made.persistence.finalizer = "kestrl.dev/unused"
    made.persistence.progress_storage = _NoProgress()
    made.persistence.diffbase_storage = _NoDiff()
    made.networking.request_timeout = 60.0
    made.networking.connect_timeout = 10.0
    made.watching.server_timeout = 240  # whole seconds: the apiserver takes no others
    made.watching.client_timeout = 300.0
    made.watching.connect_timeout = 10.0
    made.watching.inactivity_timeout = 70.0
    made.watching.chunk_size = 500
    made.process.ultimate_exiting_timeout = 10.0
    made.queueing.idle_timeout = 2.0  # a task of kopf's waits so long for each object that had an event
    for kind, labels in WATCHED.items():
        if labels:
            made.watching.label_selectors[kind.group or "", kind.version, kind.plural] = labels
    return made


def registry(take: Taken) -> kopf.OperatorRegistry:
    """The handlers: one a kind, all the same."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(_login)
    for kind in WATCHED:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id="seen")(_handler(kind, take))
    return made


def _login(**_: Any) -> kopf.ConnectionInfo:
    return log_in()


def _handler(kind: Kind, take: Taken) -> Any:
    async def seen(event: Mapping[str, Any], **_: Any) -> None:
        take(kind, dict(event["object"]), event["type"] == "DELETED")

    return seen


def _not_of_signals(record: logging.LogRecord) -> bool:
    """Kopf warns that it hears no signals in a thread; they are not its to hear."""
    return "OS signals are ignored" not in record.getMessage()


class WatchEnded(KestrlError):
    """Kopf has ended by itself."""

    code = "watch_ended"


class Watch:
    """Kopf in a thread of its own, with a loop of its own: when it ends it cancels every task that it finds."""

    def __init__(self, take: Taken, namespaces: tuple[str, ...]) -> None:
        """To be made in the loop that `take` is to be called in."""
        self._take, self._namespaces = take, namespaces
        self._loop = asyncio.get_running_loop()
        self._stop, self.begun = threading.Event(), threading.Event()
        self._told_to_stop = False

    def stop(self) -> None:
        self._told_to_stop = True
        self._stop.set()

    async def run(self) -> None:
        """Watches until told to stop, or until a stream cannot go on: then it ends, and the operator with it.

        Raises:
            WatchEnded: It was not told to stop.
        """
        why = await asyncio.to_thread(uvloop.run, self._operate())
        if not self._told_to_stop:
            raise WatchEnded(f"a watch stream cannot go on: {why}")

    async def _operate(self) -> str:
        """Returns why it ended, if not for being told to."""

        def hand_over(kind: Kind, given: Object, deleted: bool) -> None:
            self._loop.call_soon_threadsafe(self._take, kind, given, deleted)

        logging.getLogger("kopf._core.reactor.running").addFilter(_not_of_signals)
        try:
            await kopf.operator(
                registry=registry(hand_over),
                settings=settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
                ready_flag=self.begun,
            )
        except Exception as error:  # noqa: BLE001 - whatever ends kopf ends the operator, with these words
            return str(error) or type(error).__name__
        finally:
            # Kopf waits for it in a thread of its own, for which a loop waits before it closes.
            self._stop.set()
        return "kopf has ended"
