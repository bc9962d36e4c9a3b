"""Objects of one namespace at the Kubernetes API server, with the pod's own service account."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kestrl._shared.plan.settings.common import POD_UID_VARIABLE, REPLICA_VARIABLE
from kestrl.errors import UserInputError
from kestrl_sandbox.contract import SandboxFailure

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 15.0
Object = dict[str, Any]


class ClusterUnreachable(SandboxFailure):
    """The API server did not answer, or is overloaded."""

    code = "cluster_unreachable"


class ApiRefused(SandboxFailure):
    """The API server refused a request."""

    code = "cluster_refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """This pod: its place, and how it reaches the API server."""

    namespace: str
    name: str
    uid: str
    server: str
    """Base URL of the API server."""
    token_file: Path = field(repr=False)
    """File with the token of the service account, which the kubelet replaces before it expires."""
    authority: Path | None
    """Certificate of the API server's authority; None for plain HTTP."""

    @classmethod
    def here(cls) -> OwnPod:
        """The pod that this process runs in.

        Raises:
            UserInputError: It runs in none, or the pod has no service account.
        """
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        name, uid = os.environ.get(REPLICA_VARIABLE), os.environ.get(POD_UID_VARIABLE)
        if not (host and name and uid and (ACCOUNT / "token").exists()):
            raise UserInputError(
                "sandbox.claim: this process runs in no pod of a job with a service account; sandboxes are claimed "
                "on a cluster only"
            )
        return cls(
            namespace=(ACCOUNT / "namespace").read_text().strip(),
            name=name,
            uid=uid,
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            token_file=ACCOUNT / "token",
            authority=ACCOUNT / "ca.crt",
        )


class ClusterApi:
    """A client for objects of the pod's namespace."""

    def __init__(self, pod: OwnPod) -> None:
        secure = True if pod.authority is None else ssl.create_default_context(cafile=str(pod.authority))
        self.pod = pod
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=secure), timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        )

    async def request(
        self,
        method: str,
        kind: str,
        name: str = "",
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """Sends a request.

        Args:
            method: HTTP method.
            kind: Group, version and plural, such as `agents.x-k8s.io/v1beta1/sandboxes`.
            name: The object; empty for the collection.
            body: What is sent, as JSON.
            query: Parameters of the URL.

        Raises:
            ApiRefused: The server refused it.
            ClusterUnreachable: There was no answer, or one that asks to try again.
        """
        api, plural = kind.rsplit("/", 1)
        path = f"{self.pod.server}/apis/{api}/namespaces/{self.pod.namespace}/{plural}"
        url = f"{path}/{name}" if name else path
        headers = {"Authorization": f"Bearer {self.pod.token_file.read_text().strip()}"}
        try:
            async with self._session.request(method, url, json=body, params=query, headers=headers) as answer:
                body_of_answer: Object = await answer.json(content_type=None) if answer.ok else {}
                if answer.ok:
                    return body_of_answer
                message = _message(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ClusterUnreachable(f"the API server: {type(error).__name__}: {error}") from error
        if answer.status == 429 or answer.status >= 500:
            raise ClusterUnreachable(f"the API server: {answer.status}: {message}")
        raise ApiRefused(answer.status, f"the API server: {answer.status}: {message}")

    async def close(self) -> None:
        await self._session.close()


def _message(text: str) -> str:
    """The message of a Status object, or the beginning of any other text."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200].strip()
