"""The back-end that runs code in pods claimed from a warm pool of kubernetes-sigs/agent-sandbox.

A slot is one SandboxClaim and the pod that its controller binds to it, in which `kestrl sandbox serve` runs. A session
has a claim of its own, which is deleted with it; runs without a session share claims, since the server gives each a
fresh sandbox.

Nothing is left behind: a claim is deleted with its slot, by the garbage collector with the pod of the tool service, by
the next start of a tool service in the same pod, and by agent-sandbox's controller at its `shutdownTime`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Self, cast

import aiohttp
from pydantic import ValidationError

from kestrl._shared.backoff import Backoff
from kestrl.errors import UserInputError
from kestrl.tools import WarmPool
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import STRENGTH, Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.remote.claim_objects import (
    CLAIMS,
    POD_LABEL,
    SANDBOXES,
    ClaimStatus,
    claim,
    claim_name,
    runtime_class_of,
)
from kestrl_sandbox.remote.cluster_api import ApiRefused, ClusterApi, ClusterUnreachable, OwnPod
from kestrl_sandbox.remote.remote_slot import HEARTBEAT_SECONDS, RemoteSlot
from kestrl_sandbox.remote.wire import MAX_MESSAGE, SLOT_PATH, Greeting

log = logging.getLogger(__name__)
FIRST_SECONDS = 60.0
"""Time in which the first claim has to have a ready pod that answers, unless the pool's own is longer."""
POLLS = Backoff(0.1, 1.0)
"""Intervals at which a claim is read again."""
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
"""Time in which a server confirms that a connection is closed."""
DELETE_ATTEMPTS = 5
DELETIONS = Backoff(0.1, 1.6)
"""Pauses between the attempts to delete a claim."""
MAX_TOKENS = 4
"""Tokens that are tried: the present one and those before it."""


class ClaimUnusable(SandboxFailure):
    """A claim that cannot be made or used until somebody changes the cluster."""

    code = "sandbox_claim_unusable"


class _TokenRefused(Exception):
    """The server in a pod has another token."""


class ClaimedSandboxes:
    """Pods claimed from a warm pool."""

    def __init__(self, api: ClusterApi, pool: WarmPool, memory_mb: int) -> None:
        self._api, self._pool, self._memory_mb = api, pool, memory_mb
        self._http = aiohttp.ClientSession()
        self._tokens = [pool.token]
        self._accepted = False
        """Whether a server has accepted a token."""
        self._denied = ""
        self._first: RemoteSlot | None = None
        self._slots: dict[str, RemoteSlot] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._runtime: str | None = None
        self.running = True
        self.capabilities = Capabilities(backend="claim", isolation=Isolation.NAMESPACES, mechanisms={})

    @classmethod
    async def start(cls, config: PoolConfig, pool: WarmPool) -> Self:
        """Claims the first sandbox and finds out what isolates it.

        Raises:
            UserInputError: This process runs in no pod of a cluster, or the pool does not fit the config.
            SandboxFailure: No sandbox could be claimed.
        """
        self = cls(ClusterApi(OwnPod.here()), pool, config.memory_mb)
        try:
            await self._delete_left()
            self._first = await self._claimed(first=True)
        except BaseException:
            await self.close()
            raise
        return self

    async def new_slot(self) -> RemoteSlot:
        """Claims a sandbox.

        Raises:
            SandboxFailure: There was none in time, or it is isolated less than the first one.
        """
        first, self._first = self._first, None
        if first is not None and first.usable:
            return first
        if first is not None:
            self.kill_slot(first)
        return await self._claimed(first=False)

    def kill_slot(self, slot: RemoteSlot) -> None:
        """Deletes a slot's claim, which ends its pod."""
        ending = asyncio.create_task(self._end(slot))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Deletes every claim."""
        self.running = False
        self._first = None
        for slot in [*self._slots.values()]:
            self.kill_slot(slot)
        await asyncio.gather(*self._ending)
        await self._http.close()
        await self._api.close()

    async def _end(self, slot: RemoteSlot) -> None:
        if self._slots.pop(slot.name, None) is not None:
            await asyncio.gather(slot.wait_closed(), self._delete(slot.name))

    async def _claimed(self, *, first: bool) -> RemoteSlot:
        name = claim_name(self._api.pod.name)
        use_until = time.monotonic() + self._pool.use_seconds
        try:
            await self._request("POST", CLAIMS, body=claim(name, self._api.pod, self._pool, datetime.now(UTC)))
            slot = await self._bound(name, first=first, use_until=use_until)
        except BaseException:
            await self._delete(name)  # also where its creation got no answer
            raise
        self._slots[name] = slot
        return slot

    async def _bound(self, name: str, *, first: bool, use_until: float) -> RemoteSlot:
        """The slot of a claim, when its pod is there and answers."""
        looks = 0
        seconds = max(self._pool.bind_seconds, FIRST_SECONDS) if first else self._pool.bind_seconds
        latest = "it was not read"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status = await self._status(name)
                    latest = status.state
                    socket = None if status.address is None else await self._dial(status.address)
                    latest = f"{status.state}; {self._denied}" if self._denied else latest
                    if socket is not None:
                        return await self._greeted(name, socket, status.sandbox.name, first=first, use_until=use_until)
                    looks += 1
                    await asyncio.sleep(POLLS.pause(looks))
        except TimeoutError as error:
            raise SandboxFailure(
                f"the claim {name} had no usable sandbox of the pool {self._pool.name} within {seconds:g} s: {latest}",
                code="sandbox_unauthorized" if self._denied else "sandbox_unbound",
            ) from error

    async def _status(self, name: str) -> ClaimStatus:
        try:
            status = ClaimStatus.of(await self._request("GET", CLAIMS, name))
        except ClusterUnreachable as error:
            log.warning("the claim %s could not be read: %s", name, error)
            return ClaimStatus()
        if status.hopeless:
            raise ClaimUnusable(f"the pool {self._pool.name}: {status.hopeless}")
        return status

    async def _dial(self, address: str) -> aiohttp.ClientWebSocketResponse | None:
        """A connection to the server in a pod; None while it does not listen, the network is not ready for it, or a
        token that was accepted before is refused: the Secret may have been changed.
        """
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._pool.port}{SLOT_PATH}"
        self._denied = ""
        for token in self._known_tokens():
            try:
                socket = await self._connected(url, token)
            except _TokenRefused:
                continue
            self._accepted |= socket is not None
            return socket
        self._denied = (
            f"the server of the pool {self._pool.name} at {url}: 401: its token is not the one of "
            "`sandbox.claim.secretRef`"
        )
        if not self._accepted:
            raise ClaimUnusable(self._denied)
        log.warning("%s", self._denied)
        return None

    def _known_tokens(self) -> list[str]:
        """The present token, and those before it: pods of the pool have the one with which they began."""
        if self._pool.read_token is not None:
            current = self._pool.read_token()
            self._tokens = [current, *(token for token in self._tokens if token != current)][:MAX_TOKENS]
        return self._tokens

    async def _connected(self, url: str, token: str) -> aiohttp.ClientWebSocketResponse | None:
        """A connection with a token; raises `_TokenRefused` if that is wrong."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._http.ws_connect(
                    url,
                    headers={"Authorization": f"Bearer {token}"},
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=MAX_MESSAGE,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),  # pyright: ignore[reportCallIssue] - of attrs
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                raise _TokenRefused from error
            raise ClaimUnusable(
                f"the server of the pool {self._pool.name} at {url}: {error.status}: what its template runs is not "
                "`kestrl sandbox serve` of this version"
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("no sandbox answers at %s yet: %s: %s", url, type(error).__name__, error)
            return None

    async def _greeted(
        self, name: str, socket: aiohttp.ClientWebSocketResponse, sandbox: str, *, first: bool, use_until: float
    ) -> RemoteSlot:
        """The slot of a connection, after what isolates it was checked."""
        slot = RemoteSlot(name, socket, use_until=use_until)
        try:
            greeting = _greeting(await slot.greeting())
            runtime = runtime_class_of(await self._request("GET", SANDBOXES, sandbox))
            if first:
                self._record(greeting, runtime)
            else:
                self._compare(greeting, runtime)
        except BaseException:
            await slot.wait_closed()
            raise
        return slot

    def _record(self, greeting: Greeting, runtime: str | None) -> None:
        """Records what isolates the first sandbox.

        Raises:
            UserInputError: Its runs have less memory than the tool's.
        """
        if greeting.memory_mb < self._memory_mb:
            raise UserInputError(
                f"memory_mb: is {self._memory_mb}, and the sandboxes of the pool {self._pool.name} have at most "
                f"{greeting.memory_mb}; lower it, or raise --memory-mb in the pool's template"
            )
        self._runtime = runtime
        kind = _runtime_text(runtime)
        self.capabilities = Capabilities(
            backend=f"claim of {self._pool.name}: {greeting.backend} under {kind}",
            isolation=greeting.isolation,
            mechanisms={**greeting.mechanisms, "pod": kind},
        )

    def _compare(self, greeting: Greeting, runtime: str | None) -> None:
        """Compares a sandbox with the first one.

        Raises:
            SandboxFailure: It is isolated less or otherwise, or has less memory: the pool has changed.
        """
        required = self.capabilities.isolation
        if (
            STRENGTH[greeting.isolation] < STRENGTH[required]
            or runtime != self._runtime
            or greeting.memory_mb < self._memory_mb
        ):
            raise SandboxFailure(
                f"the pool {self._pool.name} has changed: a sandbox isolates by {greeting.isolation} under "
                f"{_runtime_text(runtime)} with {greeting.memory_mb} MB, and {required} under "
                f"{_runtime_text(self._runtime)} with {self._memory_mb} MB were found and asked for when the tool "
                "service started",
                code="sandbox_pool_changed",
            )

    async def _request(
        self, method: str, kind: str, name: str = "", *, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            return await self._api.request(method, kind, name, body=body)
        except ApiRefused as error:
            raise ClaimUnusable(f"{_advice(error.status, name)}{error}") from error

    async def _delete(self, name: str) -> None:
        for attempt in range(1, DELETE_ATTEMPTS + 1):
            try:
                await self._api.request("DELETE", CLAIMS, name)
            except ClusterUnreachable as error:
                log.warning("the claim %s is not deleted yet: %s", name, error)
                await asyncio.sleep(DELETIONS.pause(attempt))
            except ApiRefused as error:
                if error.status != 404:
                    log.warning("the claim %s cannot be deleted: %s", name, error)
                    break
                return
            else:
                return
        log.error("the claim %s was not deleted and stays until its shutdownTime", name)

    async def _delete_left(self) -> None:
        """Deletes the claims of an earlier process of this pod, which was killed."""
        try:
            answer = await self._api.request("GET", CLAIMS, query={"labelSelector": f"{POD_LABEL}={self._api.pod.uid}"})
        except ApiRefused as error:
            raise ClaimUnusable(f"{_advice(error.status)}{error}") from error
        items = cast("list[dict[str, Any]]", answer.get("items") or [])
        names = [str(item["metadata"]["name"]) for item in items]
        if names:
            log.warning("%d claims of an earlier process of this pod are deleted", len(names))
        await asyncio.gather(*map(self._delete, names))


def _greeting(text: str | None) -> Greeting:
    try:
        return Greeting.model_validate_json(text or "")
    except ValidationError as error:
        raise ClaimUnusable(f"the server in a claimed sandbox did not greet as this version does: {error}") from error


def _runtime_text(runtime: str | None) -> str:
    return "the default runtime" if runtime is None else f"RuntimeClass {runtime}"


def _advice(status: int, name: str = "") -> str:
    """What to do about a refusal of the API server."""
    if status == 404 and name:
        return "it is gone: "
    if status == 404:
        return "agent-sandbox with its extensions (v1beta1) is not installed in this cluster: "
    if status in {401, 403}:
        return "the service account of the pod may not claim sandboxes; docs/sandbox.md has its Role: "
    return ""
