"""The server, as used by tests."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web
from tests.fakes.kubernetes.fields import selector
from tests.fakes.kubernetes.requests import Fault, Request
from tests.fakes.kubernetes.resources import WRITING, Change, Found, Object, Refused
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.ports import free_port


class FakeKubernetes(ApiServer):
    """A fake Kubernetes API server. `async with` starts it on a free port of 127.0.0.1."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts listening, on the former port after a `stop`."""
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        self.port = self.port or free_port()  # nobody takes it between a stop and a start
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Closes all connections. The objects are kept."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_kubeconfig(self, folder: Path, *, user: str = "tester") -> Path:
        """Writes a file for KUBECONFIG; requests made with it are logged under this user."""
        path = folder / f"kubeconfig-{user}"
        named = {"name": "fake", "cluster": {"server": self.url}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": user, "namespace": "default"}}
        content: Object = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [named],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [context],
            "current-context": "fake",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    # Objects.

    def get(self, resource: str, namespace: str, name: str) -> Object:
        """An object, as a copy.

        Raises:
            Refused: It does not exist.
        """
        return copy.deepcopy(self.objects.get(self.objects.resource(resource), namespace, name))

    def find(self, resource: str, namespace: str, name: str) -> Object | None:
        """An object, as a copy; None if it does not exist."""
        try:
            return self.get(resource, namespace, name)
        except Refused:
            return None

    def list(self, resource: str, namespace: str = "", *, labels: str = "") -> list[Object]:
        """All objects of a kind, as copies."""
        fits = selector(labels)
        return [
            copy.deepcopy(item) for item in self.objects.list(self.objects.resource(resource), namespace) if fits(item)
        ]

    def create(self, resource: str, given: Mapping[str, Any], *, manager: str = "kubectl") -> Object:
        """Creates an object, its status included."""
        namespace = given.get("metadata", {}).get("namespace", "")
        return copy.deepcopy(
            self.objects.create(self.objects.resource(resource), namespace, dict(given), manager, own_status=True)
        )

    def edit(
        self,
        resource: str,
        namespace: str,
        name: str,
        changes: Mapping[str, Any],
        *,
        manager: str = "kubectl",
        subresource: str = "",
    ) -> Object:
        """Changes an object like another client, by a merge patch; `subresource` is `status` for its status, `scale`
        for replicas.
        """
        kind = self.objects.resource(resource)
        return copy.deepcopy(self.objects.merge(kind, namespace, name, dict(changes), manager, subresource))

    def delete(self, resource: str, namespace: str, name: str) -> None:
        """Deletes an object and its dependents."""
        self.objects.delete(self.objects.resource(resource), namespace, name)

    def requests(
        self, verb: str = "*", resource: str = "*", *, user: str | None = None, name: str | None = None
    ) -> Sequence[Request]:
        """The received requests, in order."""
        wanted = Fault(verb=verb, resource=resource, user=user, name=name)
        return [item for item in self.log if wanted.meets(item)]

    def writes(self, *, user: str | None = None) -> Sequence[Request]:
        """The received write requests, except those for leases and access reviews."""
        aside = {"leases", "selfsubjectaccessreviews"}
        return [
            item
            for item in self.requests(user=user)
            if item.verb in WRITING and item.resource not in aside and not item.dry_run
        ]

    def is_watched(self, change: Change, selectors: Mapping[str, str], namespaces: Sequence[str] = ()) -> bool:
        """Whether streams with these label selectors by plural deliver a change; those of a frozen resource do not."""
        resource, metadata = change.resource.plural, change.after["metadata"]
        return (
            resource in selectors
            and resource not in self._frozen
            and (not namespaces or metadata.get("namespace") in namespaces)
            and selector(selectors[resource])(change.after)
        )

    async def until(self, holds: Callable[[], Found], what: str = "it holds", *, seconds: float = 10.0) -> Found:
        """Waits until a condition holds, checked after every change and request and every 20 ms; returns its result.

        Raises:
            TimeoutError: It does not hold in time; the message says what was awaited.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while not (found := holds()):
            if loop.time() >= ends:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            await self._rung(0.02)
        return found

    # Failures.

    def fail(
        self,
        verb: str = "*",
        resource: str = "*",
        *,
        status: int | None = None,
        times: int | None = None,
        user: str | None = None,
        name: str | None = None,
        message: str = "the fake API server was made to fail",
        retry_after: float | None = None,
        delay: float = 0.0,
        held: asyncio.Event | None = None,
        late: bool = False,
        drop: bool = False,
        dry_run: bool | None = None,
    ) -> Fault:
        """Makes the next requests of a kind fail or wait; see `Fault`. The first fault that matches a request
        applies.
        """
        made = Fault(
            verb=verb,
            resource=resource,
            status=status,
            left=times,
            user=user,
            name=name,
            message=message,
            retry_after=retry_after,
            delay=delay,
            held=held,
            late=late,
            drop=drop,
            dry_run=dry_run,
        )
        self._faults.append(made)
        return made

    def freeze(self, resource: str) -> None:
        """Stops all watch streams of a resource, new ones included, from sending anything, even bookmarks, as behind a
        dead load balancer.
        """
        self._frozen.add(resource)

    def thaw(self, resource: str) -> None:
        """Lets frozen watch streams continue, with all pending events."""
        self._frozen.discard(resource)
        self._wake()

    def lose(self, resource: str, count: int = 1) -> None:
        """Drops the next changes of a resource from all watch streams."""
        self.objects.lost[resource] += count

    def end_streams(self, resource: str = "*", *, error: int | None = None) -> None:
        """Ends open watch streams; optionally after an error event, such as 410 for a version that is too old."""
        for stream in self._streams:
            if resource in {"*", stream.resource.plural}:
                stream.closed, stream.error = True, error
        self._wake()

    def compact(self) -> None:
        """Drops the history: watches from older versions and continued lists are answered with 410."""
        self.objects.compact()
        self._pages.clear()
