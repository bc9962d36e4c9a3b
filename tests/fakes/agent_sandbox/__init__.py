"""A stand-in for the controller of kubernetes-sigs/agent-sandbox on a `FakeKubernetes`.

It binds SandboxClaims as that controller does, as far as a client sees it: a Sandbox of the claim's name, the condition
Ready, and the address of a pod. Each "pod" is a server at a loopback address of its own, which ends with its claim.
The claims are checked by the project's own CustomResourceDefinition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from tests.fakes.kubernetes import Change, FakeKubernetes
from tests.fakes.ports import free_port

CLAIMS = yaml.safe_load(Path(__file__).with_name("sandboxclaims.yaml").read_text())
SANDBOXES: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "sandboxes.agents.x-k8s.io"},
    "spec": {
        "group": "agents.x-k8s.io",
        "names": {"kind": "Sandbox", "plural": "sandboxes"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


class AgentSandbox:
    """The controller, and the pods of its pools."""

    def __init__(self, cluster: FakeKubernetes, serve: Callable[[], web.Application]) -> None:
        """Serves the two kinds and binds claims from now on.

        Args:
            cluster: The API server.
            serve: Makes the application that a pod serves.
        """
        self.port = free_port()
        self.free: dict[str, int] = {}
        """Sandboxes that each pool has left, by its name."""
        self.runtime_class: str | None = None
        """RuntimeClass of the pods."""
        self.pods: dict[str, web.AppRunner] = {}
        """Running pods, by claim."""
        self.started = 0
        self._cluster, self._serve = cluster, serve
        self._tasks: set[asyncio.Task[None]] = set()
        for definition in (CLAIMS, SANDBOXES):
            cluster.create("customresourcedefinitions", definition)
        cluster.objects.listeners.append(self._seen)

    def _seen(self, change: Change) -> None:
        if change.resource.plural != "sandboxclaims" or change.type == "MODIFIED":
            return
        name = change.after["metadata"]["name"]
        work = self._bind(change.after) if change.type == "ADDED" else self.kill(name)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bind(self, claim: dict[str, Any]) -> None:
        pool, name = claim["spec"]["warmPoolRef"]["name"], claim["metadata"]["name"]
        if pool not in self.free:
            self._report(claim, "False", "WarmPoolNotFound", f'SandboxWarmPool "{pool}" not found')
        elif not self.free[pool]:
            self._report(claim, "False", "SandboxNotReady", "Sandbox is not ready")
        else:
            self.free[pool] -= 1
            address = await self._pod(name)
            runtime = {} if self.runtime_class is None else {"runtimeClassName": self.runtime_class}
            metadata = {"name": f"{pool}-{self.started}", "namespace": claim["metadata"]["namespace"]}
            sandbox = {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": metadata}
            self._cluster.create("sandboxes", {**sandbox, "spec": {"podTemplate": {"spec": runtime}}})
            self._report(claim, "True", "DependenciesReady", "", name=metadata["name"], podIPs=[address])

    def _report(self, claim: dict[str, Any], status: str, reason: str, message: str, **sandbox: Any) -> None:
        metadata = claim["metadata"]
        if self._cluster.find("sandboxclaims", metadata["namespace"], metadata["name"]) is None:
            return
        ready = {
            "type": "Ready",
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        changes = {"status": {"conditions": [ready], "sandbox": sandbox}}
        self._cluster.edit("sandboxclaims", metadata["namespace"], metadata["name"], changes, subresource="status")

    async def _pod(self, name: str) -> str:
        self.started += 1
        runner = web.AppRunner(self._serve(), handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        self.pods[name] = runner
        address = f"127.0.1.{self.started}"
        await web.TCPSite(runner, address, self.port).start()
        return address

    async def kill(self, name: str) -> None:
        """Ends a pod, as a node's end or the deletion of its claim does."""
        runner = self.pods.pop(name, None)
        if runner is not None:
            await runner.cleanup()

    async def stop(self) -> None:
        """Ends every pod."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
        for name in [*self.pods]:
            await self.kill(name)
