"""The apiserver, as far as the operator asks anything of it: the few calls, with their failures typed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, generic_resource, operators
from lightkube.core.exceptions import ConfigError
from lightkube.types import CascadeType, PatchType

from kestrl.errors import KestrlError, UserInputError
from kestrl.spec.crd import GROUP, PLURAL, VERSION
from kestrl.spec.job import KIND

Object = dict[str, Any]
MANAGER = "kestrl-operator"
"""The field manager of all that is applied."""
REQUEST_SECONDS = 30.0
PAGE = 500
NAMES_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"
UNTYPED = "failed to create typed patch object"
"""Server-side apply answers 500 with these words to an object whose fields have other types than the kind's; 422 is what is meant."""


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
"""The same as the apiserver lets us select by reason."""
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
CLUSTER_WIDE = frozenset({NODE, REVIEW, DEFINITION})
_generic: Any = generic_resource  # its classes are made when asked for, and have no types
_RESOURCES: Mapping[Kind, Any] = {
    kind: (_generic.create_global_resource if kind in CLUSTER_WIDE else _generic.create_namespaced_resource)(*kind)
    for kind in (JOB, POD, LEASE, EVENT, OLD_EVENT, REVIEW, DEFINITION, NODE, *APPLIED)
}
_BY_NAME = {(kind.api_version, kind.name): kind for kind in _RESOURCES}


class Mark(msgspec.Struct, frozen=True):
    """An object's name and version, and nothing else of it."""

    uid: str
    name: str
    written: str = msgspec.field(name="resourceVersion")
    namespace: str = ""

    @property
    def version(self) -> int:
        return int(self.written)


class _Marked(msgspec.Struct):
    metadata: Mark


class _Page(msgspec.Struct):
    rest: str = msgspec.field(name="continue", default="")


class _Marks(msgspec.Struct):
    metadata: _Page
    items: list[_Marked] | None
    """None where there is none, unlike in lists of whole objects; never left out, so that no other answer is taken for an empty list."""


class ApiProblem(KestrlError):
    """The apiserver refused, or did not answer. `retryable` where the same call may do better later."""

    code = "kubernetes"

    def __init__(self, message: str, *, status: int | None, retryable: bool) -> None:
        super().__init__(message, retryable=retryable)
        self.status = status


FAILED = (ApiError, httpx2.HTTPError, msgspec.MsgspecError)
"""What the client raises; the last where an answer has another form than was asked for."""


class Gone(ApiProblem):
    """The object, or its namespace, is not there any more."""


class Conflict(ApiProblem):
    """It exists already, or was changed meanwhile."""


class Api:
    """One connection to a cluster. All calls raise `ApiProblem`."""

    def __init__(self) -> None:
        """Connects as the pod's service account, or as KUBECONFIG says.

        Raises:
            UserInputError: There is neither.
        """
        try:
            self._client: Any = AsyncClient(timeout=httpx2.Timeout(REQUEST_SECONDS), field_manager=MANAGER)
        except ConfigError as error:
            raise UserInputError(f"no cluster: {error}; run in a pod, or set KUBECONFIG") from error
        self.requests = 0

    async def close(self) -> None:
        await self._client.aclose()

    async def apply(self, wanted: Mapping[str, Any], *, force: bool = True) -> Object:
        """Server-side apply of an object, as ours; returns it as it is now.

        Args:
            wanted: The object.
            force: Whether fields that somebody else owns are taken from them. Without it they are left, and a Conflict is raised.
        """
        kind = _BY_NAME[wanted["apiVersion"], wanted["kind"]]
        metadata = wanted["metadata"]
        return await self._patch(_RESOURCES[kind], metadata["name"], metadata["namespace"], wanted, force=force)

    async def apply_status(self, namespace: str, name: str, version: int, status: Mapping[str, Any]) -> Object:
        """Server-side apply of a job's status; returns the job as it is now.

        Args:
            namespace: Of the job.
            name: Its name.
            version: The resourceVersion that the status was made for: of another job of the name, or a later state, it is not written.
                (The uid would not do: for a subresource the apiserver does not look at it.)
            status: All of it; nothing in it may be empty, as the apiserver makes null of a map that was not empty before.

        Raises:
            Conflict: The job has changed meanwhile, or is another one.
        """
        wanted = {
            "apiVersion": JOB.api_version,
            "kind": JOB.name,
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)},
            "status": status,
        }
        return await self._patch(_RESOURCES[JOB].Status, name, namespace, wanted, force=True)

    async def _patch(
        self, resource: Any, name: str, namespace: str, wanted: Mapping[str, Any], *, force: bool
    ) -> Object:
        made = await self._call(
            "apply",
            f"{resource.__name__} {namespace}/{name}",
            self._client.patch(
                resource, name, dict(wanted), namespace=namespace, patch_type=PatchType.APPLY, force=force
            ),
        )
        return dict(made)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Deletes an object and, in the background, what it owns; one that is gone, or another of that name, is left alone."""
        # The client's own `delete` cannot name the uid; without it, a job that was made anew meanwhile would be deleted.
        request = self._client._client.request(
            "delete",
            res=_RESOURCES[kind],
            name=name,
            namespace=namespace,
            params={"propagationPolicy": CascadeType.BACKGROUND.value, "uid": uid},
        )
        try:
            await self._call("delete", f"{kind.name} {namespace}/{name}", request)
        except (Gone, Conflict):
            return

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        request = self._client.get(_RESOURCES[kind], name, **({} if namespace is None else {"namespace": namespace}))
        return dict(await self._call("get", f"{kind.name} {name}", request))

    async def create(self, kind: Kind, wanted: Mapping[str, Any]) -> Object:
        resource = _RESOURCES[kind]
        return dict(await self._call("create", kind.name, self._client.create(resource(wanted))))

    async def replace(self, kind: Kind, wanted: Mapping[str, Any]) -> Object:
        """Writes an object whose resourceVersion says what it replaces.

        Raises:
            Conflict: Somebody else was faster.
        """
        return dict(await self._call("update", kind.name, self._client.replace(_RESOURCES[kind](wanted))))

    async def merge(self, kind: Kind, namespace: str, name: str, changes: Mapping[str, Any]) -> None:
        """A merge patch."""
        request = self._client.patch(
            _RESOURCES[kind], name, dict(changes), namespace=namespace, patch_type=PatchType.MERGE
        )
        await self._call("patch", f"{kind.name} {namespace}/{name}", request)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        """All objects of a kind.

        Args:
            kind: Which.
            namespace: Where; None for everywhere.
            labels: A label that they have, as `name` or `name=value`.
            fields: Fields that they have.
        """
        name, _, value = labels.partition("=")
        selected: Any = {"labels": {name: value or operators.exists()}} if labels else {}
        if fields:
            selected["fields"] = dict(fields)
        place: Any = {} if kind in CLUSTER_WIDE else {"namespace": namespace or "*"}
        self.requests += 1
        try:
            async for item in self._client.list(_RESOURCES[kind], chunk_size=PAGE, **place, **selected):
                yield dict(item)
        except FAILED as error:
            raise problem(error, f"list {kind.plural}") from error

    async def marks(self, kind: Kind, namespace: str | None, *, labels: str = "") -> AsyncIterator[Mark]:
        """Name and version of all objects that `list` would give."""
        # The client's own `list` cannot ask for less than whole objects.
        client, more = self._client._client, True
        request = client.prepare_request(
            "list",
            _RESOURCES[kind],
            namespace=namespace or "*",
            params={"limit": PAGE, "labelSelector": labels or None},
            headers={"Accept": NAMES_ONLY},
        )
        self.requests += 1
        try:
            while more:
                answer = await client.send(client.build_adapter_request(request))
                client.raise_for_status(answer)
                page = msgspec.json.decode(answer.content, type=_Marks)
                for item in page.items or ():
                    yield item.metadata
                more = request.params["continue"] = page.metadata.rest
        except FAILED as error:
            raise problem(error, f"list {kind.plural}") from error

    async def _call(self, verb: str, what: str, request: Any) -> Any:
        self.requests += 1
        try:
            return await request
        except FAILED as error:
            raise problem(error, f"{verb} {what}") from error


def problem(error: Exception, doing: str) -> ApiProblem:
    """What an error of the client means."""
    if isinstance(error, httpx2.TransportError):
        url = error.request.url
        where = f"{url.scheme}://{url.netloc.decode()}"
        told = f"{doing}: {where} does not answer: {type(error).__name__}: {error}"
        return ApiProblem(told, status=None, retryable=True)
    if not isinstance(error, ApiError):
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        return ApiProblem(f"{doing}: {type(error).__name__}: {error}", status=status, retryable=True)
    code = error.status.code or 0
    message = f"{doing}: {error.status.message}"
    if code in {404, 410}:
        return Gone(message, status=code, retryable=False)
    if code == 409:
        return Conflict(message, status=code, retryable=True)
    if UNTYPED in message:
        code = 422
    return ApiProblem(message, status=code, retryable=code in {408, 429} or code >= 500)
