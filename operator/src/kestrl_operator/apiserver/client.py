"""The calls that the operator makes to the API server, with typed failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from kestrl.errors import KestrlError, UserInputError
from kestrl.spec.crd import GROUP, PLURAL, VERSION
from kestrl.spec.job import KIND
from kestrl_operator.apiserver.connection import log_in, secure

Object = dict[str, Any]
MANAGER = "kestrl-operator"
"""The field manager of everything that is applied."""
REQUEST_SECONDS = 30.0
PAGE = 500
LOGIN_SECONDS = 60.0
"""Seconds for which a credential is used before it is read again."""
SHOWN_BYTES = 300
JSON, APPLY, MERGE = "application/json", "application/apply-patch+yaml", "application/merge-patch+json"
NAMES_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"
UNTYPED = "failed to create typed patch object"
"""Message of the status 500 with which server-side apply answers an object that has fields of the wrong type; 422 would
be correct."""


class Kind(NamedTuple):
    """A kind of object."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


JOB = Kind(GROUP, VERSION, KIND, PLURAL)
POD = Kind("", "v1", "Pod", "pods")
STATEFUL_SET = Kind("apps", "v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
OLD_EVENT = Kind("", "v1", "Event", "events")
"""The same kind in the API version that supports selection by reason."""
REVIEW = Kind("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")
DEFINITION = Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
NODE = Kind("", "v1", "Node", "nodes")
APPLIED = (
    Kind("", "v1", "Secret", "secrets"),
    Kind("", "v1", "ConfigMap", "configmaps"),
    Kind("", "v1", "ServiceAccount", "serviceaccounts"),
    Kind("", "v1", "Service", "services"),
    STATEFUL_SET,
    DEPLOYMENT,
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
)
"""What a job becomes."""
_BY_NAME = {(kind.api_version, kind.name): kind for kind in (LEASE, *APPLIED)}


class Mark(msgspec.Struct, frozen=True):
    """Name and version of an object, without its content."""

    uid: str
    name: str
    written: str = msgspec.field(name="resourceVersion")
    namespace: str = ""

    @property
    def version(self) -> int:
        return int(self.written)


class _Marked(msgspec.Struct):
    metadata: Mark


class _Rest(msgspec.Struct):
    rest: str = msgspec.field(name="continue", default="")


class _Marks(msgspec.Struct):
    metadata: _Rest
    items: list[_Marked] | None
    """None where there is none, unlike in lists of whole objects. Required, so that no other answer passes for an empty
    list."""


class _Objects(msgspec.Struct):
    metadata: _Rest
    items: list[Object] | None


class _Status(msgspec.Struct):
    """The Status object with which Kubernetes refuses a request."""

    message: str


Form = TypeVar("Form")
Page = TypeVar("Page", _Marks, _Objects)


class ApiProblem(KestrlError):
    """The API server refused, or did not answer. `retryable` where the same call may succeed later."""

    code = "kubernetes"

    def __init__(self, message: str, *, status: int | None, retryable: bool) -> None:
        super().__init__(message, retryable=retryable)
        self.status = status


class Gone(ApiProblem):
    """The object or its namespace does not exist any more."""


class Conflict(ApiProblem):
    """The object exists already, or was changed meanwhile."""


class Api:
    """A connection to a cluster. All calls raise `ApiProblem`.

    Uses aiohttp, as kopf's streams do: a request costs a third of the CPU time that it costs with the full Kubernetes
    clients.
    """

    def __init__(self) -> None:
        """Connects with the pod's service account or KUBECONFIG.

        Raises:
            UserInputError: Neither exists, or it cannot be used.
        """
        self._known, self._read_at = log_in(), monotonic()
        self._secure = secure(self._known)
        self._session: aiohttp.ClientSession | None = None
        self.requests = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def apply(self, wanted: Mapping[str, Any], *, force: bool = True, dry_run: bool = False) -> Object:
        """Applies an object server-side as field manager `kestrl-operator`; returns the result.

        Args:
            wanted: The object.
            force: Whether to take over fields of other managers; otherwise they are kept, and a Conflict is raised.
            dry_run: Whether to check everything, admission included, without writing.
        """
        kind, metadata = _BY_NAME[wanted["apiVersion"], wanted["kind"]], wanted["metadata"]
        place = (metadata["namespace"], metadata["name"])
        return await self._apply(kind, *place, "", wanted, force=force, dry_run=dry_run)

    async def apply_status(self, namespace: str, name: str, version: int, status: Mapping[str, Any]) -> Object:
        """Applies a job's status server-side; returns the job.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            version: The resourceVersion that the status was computed for: it is not written to another job of the name,
                nor to a later state. (The API server ignores the uid for a subresource.)
            status: The complete status, without empty values: the API server turns a map into null if it was not empty
                before.

        Raises:
            Conflict: The job has changed meanwhile, or is another one.
        """
        wanted = {
            "apiVersion": JOB.api_version,
            "kind": JOB.name,
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)},
            "status": status,
        }
        return await self._apply(JOB, namespace, name, "status", wanted, force=True)

    async def _apply(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        part: str,
        wanted: Mapping[str, Any],
        *,
        force: bool,
        dry_run: bool = False,
    ) -> Object:
        query = {"fieldManager": MANAGER, "force": "true" if force else "false"}
        return await self._whole(
            "PATCH",
            f"apply {kind.name} {namespace}/{name}",
            path(kind, namespace, name, part),
            {**query, "dryRun": "All"} if dry_run else query,
            wanted,
            form=APPLY,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Deletes an object and, in the background, its dependents. An object that is gone, or another one of that
        name, is left alone.
        """
        only = {"propagationPolicy": "Background", "uid": uid}
        try:
            await self._ask("DELETE", f"delete {kind.name} {namespace}/{name}", path(kind, namespace, name), only)
        except (Gone, Conflict):
            return

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return await self._whole("GET", f"get {kind.name} {name}", path(kind, namespace, name), {})

    async def create(self, kind: Kind, wanted: Mapping[str, Any]) -> Object:
        place = path(kind, wanted.get("metadata", {}).get("namespace"))
        return await self._whole("POST", f"create {kind.name}", place, {"fieldManager": MANAGER}, wanted)

    async def replace(self, kind: Kind, wanted: Mapping[str, Any]) -> Object:
        """Replaces an object at the resourceVersion that it names.

        Raises:
            Conflict: The object was changed meanwhile.
        """
        metadata = wanted["metadata"]
        place = path(kind, metadata.get("namespace"), metadata["name"])
        return await self._whole("PUT", f"update {kind.name}", place, {"fieldManager": MANAGER}, wanted)

    async def merge(self, kind: Kind, namespace: str, name: str, changes: Mapping[str, Any]) -> None:
        """Applies a merge patch."""
        what, place = f"patch {kind.name} {namespace}/{name}", path(kind, namespace, name)
        await self._ask("PATCH", what, place, {"fieldManager": MANAGER}, changes, form=MERGE)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        """All objects of a kind.

        Args:
            kind: The kind.
            namespace: The namespace; None for all.
            labels: A label selector, as `name` or `name=value`.
            fields: A field selector.
        """
        async for page in self._pages(kind, namespace, _Objects, labels=labels, fields=fields or {}):
            for item in page.items or ():
                yield item

    async def marks(self, kind: Kind, namespace: str | None, *, labels: str = "") -> AsyncIterator[Mark]:
        """Name and version of all objects that `list` would return."""
        async for page in self._pages(kind, namespace, _Marks, labels=labels, fields={}, accept=NAMES_ONLY):
            for item in page.items or ():
                yield item.metadata

    async def _pages(
        self,
        kind: Kind,
        namespace: str | None,
        form: type[Page],
        *,
        labels: str,
        fields: Mapping[str, str],
        accept: str = JSON,
    ) -> AsyncIterator[Page]:
        selected = {"limit": str(PAGE), "labelSelector": labels}
        selected["fieldSelector"] = ",".join(f"{name}={value}" for name, value in fields.items())
        query, what = {name: value for name, value in selected.items() if value}, f"list {kind.plural}"
        while True:
            answer = await self._ask("GET", what, path(kind, namespace), query, accept=accept)
            page = _read(answer, form, what)
            yield page
            if not page.metadata.rest:
                return
            query["continue"] = page.metadata.rest

    async def _whole(
        self,
        verb: str,
        what: str,
        place: str,
        query: Mapping[str, str],
        wanted: Mapping[str, Any] | None = None,
        *,
        form: str = JSON,
    ) -> Object:
        """Sends a request that is answered with an object."""
        return _read(await self._ask(verb, what, place, query, wanted, form=form), Object, what)

    async def _ask(
        self,
        verb: str,
        what: str,
        place: str,
        query: Mapping[str, str],
        wanted: Mapping[str, Any] | None = None,
        *,
        form: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        self.requests += 1
        session, headers = self._connected(), {"Accept": accept, "Content-Type": form, **self._credential(what)}
        body = None if wanted is None else msgspec.json.encode(wanted)
        server = self._known.server.rstrip("/")
        try:
            async with session.request(
                verb, f"{server}{place}", params=query, data=body, headers=headers, allow_redirects=False
            ) as answer:
                said = await answer.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            message = f"{what}: {server} does not answer: {type(error).__name__}: {error}"
            raise ApiProblem(message, status=None, retryable=True) from error
        if answer.status >= 300:
            raise problem(answer.status, said, what)
        return said

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            known = self._known
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._secure),
                timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
                trust_env=known.trust_env,
                proxy=known.proxy_url,
            )
        return self._session

    def _credential(self, what: str) -> Mapping[str, str]:
        """The request headers with the credential, which is read again periodically because service account tokens are
        rotated.
        """
        if monotonic() - self._read_at > LOGIN_SECONDS:
            try:
                self._known, self._read_at = log_in(), monotonic()
            except UserInputError as error:
                raise ApiProblem(f"{what}: {error}", status=None, retryable=True) from error
        return self._known.as_http_headers()


def path(kind: Kind, namespace: str | None, name: str = "", part: str = "") -> str:
    """The path of a kind, of one object, or of a subresource of one; without a namespace, of all namespaces."""
    api = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    within = ("namespaces", namespace) if namespace else ()
    return "/".join(filter(None, (api, *within, kind.plural, name, part)))


def _read(answer: bytes, form: type[Form], what: str) -> Form:
    try:
        return msgspec.json.decode(answer, type=form)
    except msgspec.MsgspecError as error:
        raise ApiProblem(f"{what}: {type(error).__name__}: {error}", status=None, retryable=True) from error


def problem(status: int, said: bytes, doing: str) -> ApiProblem:
    """The exception for an error status."""
    try:
        reason = msgspec.json.decode(said, type=_Status).message
    except msgspec.MsgspecError:
        reason = f"HTTP {status}: {said[:SHOWN_BYTES].decode(errors='replace')}"
    message = f"{doing}: {reason}"
    if status in {404, 410}:
        return Gone(message, status=status, retryable=False)
    if status == 409:
        return Conflict(message, status=status, retryable=True)
    if UNTYPED in message:
        status = 422
    return ApiProblem(message, status=status, retryable=status in {408, 429} or status >= 500)
