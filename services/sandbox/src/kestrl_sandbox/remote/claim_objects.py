"""SandboxClaims and Sandboxes of agent-sandbox (v1beta1), as far as they are used. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel, Field

from kestrl.tools import WarmPool
from kestrl_sandbox.remote.cluster_api import OwnPod

CLAIMS = "extensions.agents.x-k8s.io/v1beta1/sandboxclaims"
SANDBOXES = "agents.x-k8s.io/v1beta1/sandboxes"
POD_LABEL = "kestrl.dev/claimed-by"
"""Label of a claim with the uid of the pod of the tool service."""
NEVER_BOUND = frozenset({"WarmPoolNotFound", "TemplateNotFound", "InvalidMetadata"})
"""Reasons of a claim's condition Ready that waiting does not change."""


class ClaimCondition(BaseModel):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class BoundSandbox(BaseModel):
    """The Sandbox of a claim."""

    name: str = ""
    pod_ips: list[str] = Field(default=[], alias="podIPs")


class ClaimStatus(BaseModel):
    """Status of a SandboxClaim."""

    conditions: list[ClaimCondition] = []
    sandbox: BoundSandbox = BoundSandbox()

    @classmethod
    def of(cls, claim: Mapping[str, Any]) -> ClaimStatus:
        return cls.model_validate(claim.get("status") or {})

    @property
    def ready(self) -> ClaimCondition | None:
        return next((item for item in self.conditions if item.type == "Ready"), None)

    @property
    def address(self) -> str | None:
        """Address of the pod; None while it is not ready."""
        ready = self.ready is not None and self.ready.status == "True"
        return self.sandbox.pod_ips[0] if ready and self.sandbox.pod_ips else None

    @property
    def hopeless(self) -> str:
        """Why the claim is never bound; empty if it may be."""
        ready = self.ready
        return f"{ready.reason}: {ready.message}" if ready is not None and ready.reason in NEVER_BOUND else ""

    @property
    def state(self) -> str:
        """What the controller says about the claim."""
        if self.ready is None:
            return "it has no status; does the controller of agent-sandbox run, with its extensions?"
        return f"{self.ready.reason}: {self.ready.message or 'no message'}"


def claim_name(pod: str) -> str:
    """A new name, which begins with the pod's; a Sandbox and a pod may have it too."""
    return f"{pod[:46].rstrip('-.')}-{secrets.token_hex(8)}"


def claim(name: str, pod: OwnPod, pool: WarmPool, now: datetime) -> dict[str, Any]:
    """A SandboxClaim that ends with the pod of the tool service, and at its `shutdownTime` at the latest."""
    end = now + timedelta(seconds=pool.keep_seconds)
    return {
        "apiVersion": CLAIMS.rpartition("/")[0],
        "kind": "SandboxClaim",
        "metadata": {
            "name": name,
            "namespace": pod.namespace,
            "labels": {"app.kubernetes.io/part-of": "kestrl", POD_LABEL: pod.uid},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}],
        },
        "spec": {
            "warmPoolRef": {"name": pool.name},
            "lifecycle": {"shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"},
        },
    }


def runtime_class_of(sandbox: Mapping[str, Any]) -> str | None:
    """RuntimeClass of a Sandbox's pod; None for the default runtime of its node."""
    name = sandbox["spec"]["podTemplate"]["spec"].get("runtimeClassName")
    return None if name is None else str(name)
