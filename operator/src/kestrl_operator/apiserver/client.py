"""The calls that the operator makes to the API server, with typed failures. The official client makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from kubernetes.aio.client.exceptions import ApiException

from kestrl.errors import KestrlError, UserInputError
from kestrl_operator.apiserver.connection import connect
from kestrl_operator.apiserver.kinds import JOB, Kind, kind_of, resource
from kestrl_operator.state.snapshot import MANAGER

Object = dict[str, Any]
SCALER = f"{MANAGER}-scale"
"""The field manager of numbers of replicas that others may change."""
REQUEST_SECONDS = 30.0
PAGE = 500
SHOWN_CHARACTERS = 300
MERGE = "application/merge-patch+json"
TESTS = "application/json-patch+json"
NAMES_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"
UNREAD: Mapping[str, Any] = {"serialize": False, "_request_timeout": aiohttp.ClientTimeout(total=REQUEST_SECONDS)}
"""Arguments of every call of the client. It does not decode the answer: a list of 500 objects would cost it ten times
as much CPU time."""
UNTYPED = "failed to create typed patch object"
"""Message of the status 500 with which server-side apply answers an object that has fields of the wrong type; 422 would
be correct."""


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
    """A connection to a cluster, with the pod's service account or KUBECONFIG. The first call logs in.

    All calls raise `ApiProblem`, and the first one `UserInputError` where there is no cluster to log in to.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._login = asyncio.Lock()
        self.requests = 0

    async def close(self) -> None:
        if self._client is not None:
            await self._client.client.close()

    async def apply(self, body: Mapping[str, Any], *, force: bool = True, dry_run: bool = False) -> Object:
        """Applies an object server-side as field manager `kestrl-operator`; returns the result.

        Args:
            body: The object.
            force: Whether to take over fields of other managers; otherwise they are kept, and a Conflict is raised.
            dry_run: Whether to check everything, admission included, without writing.
        """
        kind = kind_of(body)
        return await self._apply(kind, resource(kind), body, force=force, dry_run="All" if dry_run else None)

    async def apply_status(
        self, namespace: str, name: str, version: int, status: Mapping[str, Any], *, kind: Kind = JOB
    ) -> Object:
        """Applies a job's status server-side; returns the job.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            version: The resourceVersion that the status was computed for: it is not written to another job of the name,
                nor to a later state. (The API server ignores the uid for a subresource.)
            status: The complete status, without empty values: the API server turns a map into null if it was not empty
                before.
            kind: Kind of the job.

        Raises:
            Conflict: The job has changed meanwhile, or is another one.
        """
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)},
            "status": status,
        }
        return await self._apply(kind, resource(kind).status, body, force=True)

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> Object:
        """Sets the number of replicas of a workload as field manager `kestrl-operator-scale`, which others may take it
        from; returns the workload.

        Raises:
            Gone: There is no such workload.
        """
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        return await self._apply(kind, resource(kind), body, force=True, manager=SCALER)

    async def _apply(
        self,
        kind: Kind,
        into: Any,
        body: Mapping[str, Any],
        *,
        force: bool,
        dry_run: str | None = None,
        manager: str = MANAGER,
    ) -> Object:
        client, metadata = await self._connected(), body["metadata"]
        call = client.server_side_apply(
            into,
            body,
            field_manager=manager,
            force_conflicts="true" if force else "false",
            dry_run=dry_run,
            **UNREAD,
        )
        return await self._object(f"apply {kind.name} {metadata['namespace']}/{metadata['name']}", call)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Deletes an object and, in the background, its dependents. An object that is gone, or another one of that
        name, is left alone.
        """
        client, only = await self._connected(), [("uid", uid)]
        call = client.delete(
            resource(kind), name, namespace, propagation_policy="Background", query_params=only, **UNREAD
        )
        try:
            await self._answer(f"delete {kind.name} {namespace}/{name}", call)
        except (Gone, Conflict):
            return

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        client = await self._connected()
        return await self._object(f"get {kind.name} {name}", client.get(resource(kind), name, namespace, **UNREAD))

    async def create(self, kind: Kind, body: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        client, only = await self._connected(), "All" if dry_run else None
        call = client.create(resource(kind), body, field_manager=MANAGER, dry_run=only, **UNREAD)
        return await self._object(f"create {kind.name}", call)

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """Replaces an object at the resourceVersion that it names.

        Raises:
            Conflict: The object was changed meanwhile.
        """
        client = await self._connected()
        call = client.replace(resource(kind), body, field_manager=MANAGER, **UNREAD)
        return await self._object(f"update {kind.name}", call)

    async def passes(self, kind: Kind, namespace: str, name: str, facts: Mapping[str, str]) -> Object | None:
        """The object, if all of its fields have these values; None otherwise. This needs no right to read it.

        Args:
            kind: The kind.
            namespace: Namespace of the object.
            name: Its name.
            facts: Values by JSON pointer.

        Raises:
            Gone: There is no such object.
        """
        client, operation = await self._connected(), f"test {kind.name} {namespace}/{name}"
        tests = [{"op": "test", "path": path, "value": value} for path, value in facts.items()]
        call = client.patch(
            resource(kind), tests, name, namespace, content_type=TESTS, field_manager=MANAGER, dry_run="All", **UNREAD
        )
        try:
            return await self._object(operation, call)
        except ApiProblem as error:
            if error.status == 422:
                return None
            raise

    async def merge(self, kind: Kind, namespace: str, name: str, changes: Mapping[str, Any]) -> None:
        """Applies a merge patch."""
        client = await self._connected()
        call = client.patch(
            resource(kind), changes, name, namespace, content_type=MERGE, field_manager=MANAGER, **UNREAD
        )
        await self._answer(f"patch {kind.name} {namespace}/{name}", call)

    async def merge_status(
        self, kind: Kind, namespace: str, name: str, version: str, changes: Mapping[str, Any]
    ) -> Object:
        """Applies a merge patch to the status of an object, at the resourceVersion that it was computed for; returns
        the object.

        Raises:
            Conflict: The object was changed meanwhile.
        """
        client = await self._connected()
        body = {"metadata": {"resourceVersion": version}, "status": changes}
        call = client.patch(
            resource(kind).status, body, name, namespace, content_type=MERGE, field_manager=MANAGER, **UNREAD
        )
        return await self._object(f"patch the status of {kind.name} {namespace}/{name}", call)

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
        accept: str = "application/json",
    ) -> AsyncIterator[Page]:
        client, operation, continuation = await self._connected(), f"list {kind.plural}", ""
        selected = ",".join(f"{name}={value}" for name, value in fields.items())
        while True:
            call = client.get(
                resource(kind),
                namespace=namespace,
                label_selector=labels or None,
                field_selector=selected or None,
                limit=PAGE,
                _continue=continuation or None,
                header_params={"Accept": accept},
                **UNREAD,
            )
            page = _read(await self._answer(operation, call), form, operation)
            yield page
            continuation = page.metadata.rest
            if not continuation:
                return

    async def _connected(self) -> Any:
        async with self._login:
            if self._client is None:
                self._client = await connect()
            return self._client

    async def _object(self, operation: str, call: Awaitable[Any]) -> Object:
        """Makes a call that is answered with an object."""
        return _read(await self._answer(operation, call), Object, operation)

    async def _answer(self, operation: str, call: Awaitable[Any]) -> bytes:
        """Makes a call of the client, and translates its errors.

        Args:
            operation: The call, for messages.
            call: The call.
        """
        self.requests += 1
        try:
            answer = await call
            return await answer.read()
        except ApiException as error:
            refused: Any = error
            raise problem(refused.status, refused.body or "", operation) from error
        except UserInputError as error:  # the credential could not be read again
            raise ApiProblem(f"{operation}: {error}", status=None, retryable=True) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            server = self._client.configuration.host
            message = f"{operation}: {server} does not answer: {type(error).__name__}: {error}"
            raise ApiProblem(message, status=None, retryable=True) from error


def _read(answer: bytes, form: type[Form], operation: str) -> Form:
    try:
        return msgspec.json.decode(answer, type=form)
    except msgspec.MsgspecError as error:
        raise ApiProblem(f"{operation}: {type(error).__name__}: {error}", status=None, retryable=True) from error


def problem(status: int, answer_text: str, operation: str) -> ApiProblem:
    """The exception for an error status."""
    try:
        reason = msgspec.json.decode(answer_text, type=_Status).message
    except msgspec.MsgspecError:
        reason = f"HTTP {status}: {answer_text[:SHOWN_CHARACTERS]}"
    message = f"{operation}: {reason}"
    if status in {404, 410}:
        return Gone(message, status=status, retryable=False)
    if status == 409:
        return Conflict(message, status=status, retryable=True)
    if UNTYPED in message:
        status = 422
    return ApiProblem(message, status=status, retryable=status in {408, 429} or status >= 500)
