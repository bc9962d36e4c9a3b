"""The server as tests see it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web

from kestrl.testing.kubernetes.fields import selector
from kestrl.testing.kubernetes.requests import Fault, Request
from kestrl.testing.kubernetes.resources import WRITING, Found, Object, Refused
from kestrl.testing.kubernetes.server import ApiServer


class FakeKubernetes(ApiServer):
    """The server. `async with` starts it on an ephemeral port of 127.0.0.1."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens, on the former port after a `stop`."""
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Open requests lose their connection. What the server holds stays."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_kubeconfig(self, folder: Path, *, user: str = "tester") -> Path:
        """A file for KUBECONFIG; requests made with it are logged as this user's."""
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

    # What a test reads and changes.

    def get(self, resource: str, namespace: str, name: str) -> Object:
        """An object, as a copy.

        Raises:
            Refused: It is not there.
        """
        return copy.deepcopy(self.objects.get(self.objects.resource(resource), namespace, name))

    def find(self, resource: str, namespace: str, name: str) -> Object | None:
        """The same, or None."""
        try:
            return self.get(resource, namespace, name)
        except Refused:
            return None

    def list(self, resource: str, namespace: str = "", *, labels: str = "") -> list[Object]:
        """All of a kind, as copies."""
        fits = selector(labels)
        return [
            copy.deepcopy(item) for item in self.objects.list(self.objects.resource(resource), namespace) if fits(item)
        ]

    def create(self, resource: str, given: Mapping[str, Any], *, manager: str = "kubectl") -> Object:
        """Makes an object, its status included."""
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
        """Changes an object as somebody would, by a merge patch; `subresource` is `status` for its status, `scale` for replicas."""
        kind = self.objects.resource(resource)
        return copy.deepcopy(self.objects.merge(kind, namespace, name, dict(changes), manager, subresource))

    def delete(self, resource: str, namespace: str, name: str) -> None:
        """Deletes an object and what it owns."""
        self.objects.delete(self.objects.resource(resource), namespace, name)

    def requests(
        self, verb: str = "*", resource: str = "*", *, user: str | None = None, name: str | None = None
    ) -> Sequence[Request]:
        """Requests received, in order."""
        wanted = Fault(verb=verb, resource=resource, user=user, name=name)
        return [item for item in self.log if wanted.meets(item)]

    def writes(self, *, user: str | None = None) -> Sequence[Request]:
        """Requests that write, but for leases and access reviews: what an operator does to people's objects."""
        aside = {"leases", "selfsubjectaccessreviews"}
        return [
            item
            for item in self.requests(user=user)
            if item.verb in WRITING and item.resource not in aside and not item.dry_run
        ]

    async def until(self, holds: Callable[[], Found], what: str = "it holds", *, seconds: float = 10.0) -> Found:
        """Waits until something holds, looked at after every change, request, and 20 ms; returns what it gave.

        Raises:
            TimeoutError: It does not, and says what.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while not (found := holds()):
            if loop.time() >= ends:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            await self._rung(0.02)
        return found

    # What goes wrong.

    def fail(
        self,
        verb: str = "*",
        resource: str = "*",
        *,
        status: int | None = None,
        times: int | None = None,
        user: str | None = None,
        name: str | None = None,
        message: str = "the fake API server was told to fail",
        retry_after: float | None = None,
        delay: float = 0.0,
        late: bool = False,
        drop: bool = False,
        dry_run: bool | None = None,
    ) -> Fault:
        """The next requests of a kind fail, or are slow; see `Fault`. The first fault that meets a request decides."""
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
            late=late,
            drop=drop,
            dry_run=dry_run,
        )
        self._faults.append(made)
        return made

    def freeze(self, resource: str) -> None:
        """Watch streams of a resource, open ones and new, say nothing, not even bookmarks, as behind a dead load balancer."""
        self._frozen.add(resource)

    def thaw(self, resource: str) -> None:
        """They go on, with all that they have not told."""
        self._frozen.discard(resource)
        self._wake()

    def lose(self, resource: str, count: int = 1) -> None:
        """The next changes of a resource are told by no watch stream."""
        self.objects.lost[resource] += count

    def end_streams(self, resource: str = "*", *, error: int | None = None) -> None:
        """Open watch streams end; with an error told before, as 410 for a version that is too old."""
        for stream in self._streams:
            if resource in {"*", stream.resource.plural}:
                stream.closed, stream.error = True, error
        self._wake()

    def compact(self) -> None:
        """No older version can be watched from, and no list be continued: both are answered with 410."""
        self.objects.compact()
        self._pages.clear()
