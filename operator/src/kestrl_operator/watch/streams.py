"""Watch streams, on kopf: it hands every event to the operator, and decides, stores and writes nothing.

Only `on.event` handlers are registered: they keep no progress, so no annotation or finalizer is ever put on an object,
and a stopped operator blocks no deletion.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import kopf
import uvloop

from kestrl.errors import KestrlError
from kestrl_operator.apiserver.connection import watch_login
from kestrl_operator.apiserver.kinds import (
    BATCH_JOB,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    KUEUE_WORKLOAD,
    NETWORK_POLICY,
    POD,
    SERVICE,
    SFT_JOB,
    STATEFUL_SET,
    Kind,
)
from kestrl_operator.state.sft import SFT_LABEL
from kestrl_operator.state.store import JOB_LABEL

Object = Mapping[str, Any]
Taken = Callable[[Kind, Object, bool], None]
"""A callback with the kind, the object, and whether it was deleted."""
MANAGED = "app.kubernetes.io/managed-by=kestrl-operator"
WATCHED: Mapping[Kind, str] = {
    JOB: "",
    POD: JOB_LABEL,
    STATEFUL_SET: MANAGED,
    DEPLOYMENT: MANAGED,
    SERVICE: MANAGED,
    NETWORK_POLICY: MANAGED,
    DISRUPTION_BUDGET: MANAGED,
    SFT_JOB: "",
    BATCH_JOB: SFT_LABEL,
}
"""The kinds that are watched, with the label selector for each."""
WATCHED_WITH_KUEUE: Mapping[Kind, str] = {**WATCHED, KUEUE_WORKLOAD: MANAGED}


def watched(*, kueue: bool) -> Mapping[Kind, str]:
    """The kinds that an operator watches, with Kueue or without."""
    return WATCHED_WITH_KUEUE if kueue else WATCHED


class _NoDiff(kopf.DiffBaseStorage):
    """A diff storage that stores nothing. Kopf compares each object with its last state for change handlers, of which
    there are none, and that costs more than everything else.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("event handlers have no last state to store")


class _NoProgress(kopf.ProgressStorage):
    """A progress storage that stores nothing: handlers make no progress on an object, so kopf never writes an
    annotation.
    """

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("event handlers have no progress to store")

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def settings(kinds: Mapping[Kind, str] = WATCHED) -> kopf.OperatorSettings:
    """Kopf's settings; docs/operator.md gives the reason for each."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.peering.standalone = True  # this operator elects its leader with a Lease of its own
    kopf_settings.peering.mandatory = False
    kopf_settings.posting.enabled = False  # this operator publishes few events of its own
    kopf_settings.scanning.disabled = True  # no rights on CRDs and namespaces
    kopf_settings.persistence.finalizer = "kestrl.dev/unused"
    kopf_settings.persistence.progress_storage = _NoProgress()
    kopf_settings.persistence.diffbase_storage = _NoDiff()
    kopf_settings.networking.request_timeout = 60.0
    kopf_settings.networking.connect_timeout = 10.0
    kopf_settings.watching.server_timeout = 240  # whole seconds: the API server accepts no fractions
    kopf_settings.watching.client_timeout = 300.0
    kopf_settings.watching.connect_timeout = 10.0
    kopf_settings.watching.inactivity_timeout = 70.0
    kopf_settings.watching.chunk_size = 500
    kopf_settings.process.ultimate_exiting_timeout = 10.0
    kopf_settings.queueing.idle_timeout = 2.0  # kopf keeps a task for each object for this long after its last event
    for kind, labels in kinds.items():
        if labels:
            kopf_settings.watching.label_selectors[kind.group or "", kind.version, kind.plural] = labels
    return kopf_settings


def registry(take: Taken, kinds: Iterable[Kind] = WATCHED) -> kopf.OperatorRegistry:
    """The handlers: the same one for each kind."""
    kopf_registry = kopf.OperatorRegistry()
    kopf.on.login(registry=kopf_registry)(_login)
    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=kopf_registry, id="seen")(_handler(kind, take))
    return kopf_registry


async def _login(**_: Any) -> kopf.ConnectionInfo:
    return await watch_login()


def _handler(kind: Kind, take: Taken) -> Any:
    async def seen(event: Mapping[str, Any], **_: Any) -> None:
        take(kind, dict(event["object"]), event["type"] == "DELETED")

    return seen


def _not_of_signals(record: logging.LogRecord) -> bool:
    """Drops kopf's warning that OS signals are ignored in a thread; the operator handles signals itself."""
    return "OS signals are ignored" not in record.getMessage()


class WatchEnded(KestrlError):
    """Kopf ended although it was not asked to."""

    code = "watch_ended"


class WatchThread:
    """Kopf in a thread with its own event loop, because on its end it cancels every task of its loop."""

    def __init__(self, take: Taken, namespaces: tuple[str, ...], kinds: Mapping[Kind, str] = WATCHED) -> None:
        """Prepares the watch; to be called in the event loop that `take` is to run in."""
        self._take, self._namespaces, self._kinds = take, namespaces, kinds
        self._loop = asyncio.get_running_loop()
        self._stop, self.begun = threading.Event(), threading.Event()
        self._stop_requested = False

    def stop(self) -> None:
        self._stop_requested = True
        self._stop.set()

    async def run(self) -> None:
        """Watches until `stop` is called. If a stream cannot go on, the watch ends, and the operator with it.

        Raises:
            WatchEnded: The watch ended without `stop`.
        """
        reason = await asyncio.to_thread(uvloop.run, self._operate())
        if not self._stop_requested:
            raise WatchEnded(f"a watch stream cannot go on: {reason}")

    async def _operate(self) -> str:
        """Runs kopf; returns why it ended, if not because of `stop`."""

        def hand_over(kind: Kind, body: Object, deleted: bool) -> None:
            self._loop.call_soon_threadsafe(self._take, kind, body, deleted)

        logging.getLogger("kopf._core.reactor.running").addFilter(_not_of_signals)
        try:
            await kopf.operator(
                registry=registry(hand_over, self._kinds),
                settings=settings(self._kinds),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
                ready_flag=self.begun,
            )
        except Exception as error:  # noqa: BLE001 - any error that ends kopf ends the operator, with this message
            return str(error) or type(error).__name__
        finally:
            # Kopf waits for this event in a thread of its own, and a loop waits for that thread before it closes.
            self._stop.set()
        return "kopf has ended"
