"""The HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

import yaml
from aiohttp import web
from tests.fakes.kubernetes.fields import field_selector, selector
from tests.fakes.kubernetes.objects import Objects
from tests.fakes.kubernetes.requests import Fault, Request
from tests.fakes.kubernetes.resources import APPLY, BUILT_IN, MERGE, TESTS, Change, Object, Refused, Resource

NAMES_ONLY = "application/json;as=PartialObjectMetadataList;"
"""Media type of a list of metadata only."""
NAMED = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata"}


@dataclass(slots=True, eq=False)
class _Stream:
    """An open watch."""

    resource: Resource
    closed: bool = False
    error: int | None = None


class ApiServer:
    """The HTTP API over `Objects`: discovery, lists, watches and writes."""

    def __init__(self, *, bookmark_seconds: float = 60.0, denied: Sequence[tuple[str, str]] = ()) -> None:
        """Creates the server, which listens after `start`.

        Args:
            bookmark_seconds: Interval of bookmarks on a quiet watch stream that asked for them.
            denied: Verbs and resources that are denied to every user, as `("patch", "agentrljobs/status")`, by access
                reviews and by the request itself with 403.
        """
        self.objects = Objects()
        self.objects.listeners.append(lambda _: self._wake())
        self.denied = set(denied)
        self.log: list[Request] = []
        """Every request received, in order."""
        self.port = 0
        self._bookmarks = bookmark_seconds
        self._faults: list[Fault] = []
        self._frozen: set[str] = set()
        self._streams: set[_Stream] = set()
        self._pages: dict[str, tuple[list[Object], str]] = {}
        self._bell = asyncio.Event()
        self._runner: web.AppRunner | None = None

    def _wake(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    async def _rung(self, seconds: float) -> None:
        bell = self._bell
        try:
            async with asyncio.timeout(seconds):
                await bell.wait()
        except TimeoutError:
            return

    # HTTP.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.path.split("/") if part]
        asked, where = self._asked(request, parts)
        if asked is None:
            found = self._discovered(parts)
            return web.Response(status=404, text="404 page not found\n") if found is None else _answer(200, found)
        resource, subresource = where
        self.log.append(asked)
        self._wake()
        try:
            asked.body = await _body(request)
            answer = await self._with_faults(request, asked, resource, subresource)
        except Refused as refused:
            asked.status = refused.status
            headers = {} if refused.retry_after is None else {"Retry-After": f"{refused.retry_after:g}"}
            return _answer(refused.status, refused.body(), headers)
        finally:
            self._wake()
        asked.status = answer.status
        return answer

    def _asked(self, request: web.Request, parts: list[str]) -> tuple[Request | None, tuple[Resource, str]]:
        """The parsed request; None where its path names no resource."""
        nothing = (None, (BUILT_IN[0], ""))
        group = "".join(parts[1:2]) if parts[:1] == ["apis"] else ""
        version, *rest = (parts[2:] if group else parts[1:]) or [""]
        if not rest or parts[0] not in {"api", "apis"}:
            return nothing
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        resource = self.objects.resources.get((group, rest[0]))
        if resource is None or resource.version != version:
            return nothing
        name, subresource = (*rest[1:], "", "")[:2]
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        watching = request.query.get("watch") in {"1", "true"}
        verb = verbs.get(request.method) or ("get" if name else "watch" if watching else "list")
        asked = Request(
            verb=verb,
            resource=f"{resource.plural}/{subresource}" if subresource else resource.plural,
            namespace=namespace,
            name=name,
            user=request.headers.get("Authorization", "").removeprefix("Bearer "),
            at=asyncio.get_running_loop().time(),
            accepts=request.headers.get("Accept", ""),
            dry_run=request.query.get("dryRun", "") == "All",
        )
        return asked, (resource, subresource)

    def _discovered(self, parts: list[str]) -> Object | None:
        """The answer of `/version`, `/api` and `/apis`."""
        served = list(self.objects.resources.values())
        groups = sorted({item.group for item in served if item.group})
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake", "platform": "linux/amd64"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [self._group(name) for name in groups]}
            case ["apis", group] if group in groups:
                return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group)}
            case ["api", version]:
                return _resource_list([item for item in served if not item.group and item.version == version])
            case ["apis", group, version]:
                return _resource_list([item for item in served if (item.group, item.version) == (group, version)])
            case _:
                return None

    def _group(self, name: str) -> Object:
        versions = sorted({item.version for item in self.objects.resources.values() if item.group == name})
        listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
        return {"name": name, "versions": listed, "preferredVersion": listed[0]}

    async def _with_faults(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str
    ) -> web.StreamResponse:
        fault = next((item for item in self._faults if item.meets(asked)), None)
        if fault is None:
            return await self._done(request, asked, resource, subresource)
        fault.hit()
        answer = await self._done(request, asked, resource, subresource) if fault.late else None
        await asyncio.sleep(fault.delay)
        if fault.held is not None:
            await fault.held.wait()
        if fault.drop and request.transport is not None:
            request.transport.close()
        if fault.status is not None or fault.drop:
            raise Refused(fault.status or 500, fault.message, retry_after=fault.retry_after)
        return answer or await self._done(request, asked, resource, subresource)

    async def _done(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str
    ) -> web.StreamResponse:
        if (asked.verb, asked.resource) in self.denied:
            place = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
            raise Refused(
                403,
                f'{resource.full} "{asked.name}" is forbidden: User "{asked.user}" cannot {asked.verb} resource '
                f'"{asked.resource}" in API group "{resource.group}"{place}',
            )
        if asked.dry_run and request.content_type not in {APPLY, TESTS} and asked.verb != "create":
            raise Refused(400, "the fake knows no dry run of this request")
        if asked.verb == "watch":
            return await self._watched(request, asked, resource)
        if asked.verb == "list":
            return _answer(200, self._listed(request, asked, resource))
        status, made = self._carried_out(request, asked, resource, subresource)
        return _answer(status, made)

    def _carried_out(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str
    ) -> tuple[int, Object]:
        """Carries out a request for one object."""
        if subresource and not (subresource == "status" and resource.status):
            raise Refused(404, "the server could not find the requested resource")
        objects, body = self.objects, asked.body
        manager = request.query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0]
        if asked.verb == "get":
            return 200, objects.get(resource, asked.namespace, asked.name)
        if asked.verb == "create":
            if resource.plural == "selfsubjectaccessreviews":
                return 201, self._reviewed(body)
            with objects.rehearsed(asked.dry_run):
                made = objects.create(resource, asked.namespace, body, manager)
            self._collect_soon()
            return 201, made
        if asked.verb == "update":
            return 200, objects.replace(resource, asked.namespace, body, manager, subresource)
        if asked.verb == "delete":
            if not asked.name:
                raise Refused(405, "the fake deletes no collections")
            options = cast("Object", body or {})
            orphan = (options.get("propagationPolicy") or request.query.get("propagationPolicy")) == "Orphan"
            uid = options.get("preconditions", {}).get("uid") or request.query.get("uid", "")
            return 200, objects.delete(resource, asked.namespace, asked.name, uid=uid, orphan=orphan)
        return self._patched(request, asked, resource, subresource, manager)

    def _patched(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str, manager: str
    ) -> tuple[int, Object]:
        if request.content_type == MERGE:
            made = self.objects.merge(resource, asked.namespace, asked.name, asked.body, manager, subresource)
            return 200, made
        if request.content_type == TESTS:
            return 200, _tested(self.objects.get(resource, asked.namespace, asked.name), asked.body)
        if request.content_type != APPLY:
            raise Refused(415, f"the fake takes {APPLY} and {MERGE}, not {request.content_type}")
        if not request.query.get("fieldManager"):
            raise Refused(400, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        made, new = self.objects.apply(
            resource,
            asked.namespace,
            asked.name,
            asked.body,
            manager,
            force=request.query.get("force") in {"1", "true"},
            subresource=subresource,
            dry_run=asked.dry_run,
        )
        if new and not asked.dry_run:
            self._collect_soon()
        return 201 if new else 200, made

    def _collect_soon(self) -> None:
        if self.objects.collecting:
            asyncio.get_running_loop().call_soon(self.objects.collect_orphans)

    def _reviewed(self, body: Object) -> Object:
        """Answers an access review: what is not denied is allowed."""
        asked = body["spec"]["resourceAttributes"]
        subresource = asked.get("subresource")
        named = f"{asked['resource']}/{subresource}" if subresource else asked["resource"]
        return {**body, "status": {"allowed": (asked["verb"], named) not in self.denied}}

    def _listed(self, request: web.Request, asked: Request, resource: Resource) -> Object:
        token, limit = request.query.get("continue", ""), int(request.query.get("limit") or 0)
        if token:
            if token not in self._pages:
                raise Refused(410, "The provided continue parameter is too old to display a consistent list result")
            items, version = self._pages.pop(token)
        else:
            fits = _selected(request)
            items = [item for item in self.objects.list(resource, asked.namespace) if fits(item)]
            version = str(self.objects.version)
        page, rest = (items[:limit], items[limit:]) if limit else (items, [])
        names_only = asked.accepts.startswith(NAMES_ONLY)
        if names_only:
            page = [{**NAMED, "metadata": item["metadata"]} for item in page]
        elif resource.schema is None:  # as the real API server: items in a list of a built-in kind have no kind
            page = [{name: item[name] for name in item if name not in {"apiVersion", "kind"}} for item in page]
        metadata: Object = {"resourceVersion": version}
        if rest:
            metadata |= {"continue": uuid4().hex, "remainingItemCount": len(rest)}
            self._pages[metadata["continue"]] = (rest, version)
        if names_only:  # as the real API server: an empty list has null for its items
            return {**NAMED, "kind": "PartialObjectMetadataList", "metadata": metadata, "items": page or None}
        return {"apiVersion": resource.api_version, "kind": f"{resource.kind}List", "metadata": metadata, "items": page}

    async def _watched(self, request: web.Request, asked: Request, resource: Resource) -> web.StreamResponse:
        fits = _selected(request)
        given = request.query.get("resourceVersion", "")
        marks = request.query.get("allowWatchBookmarks") in {"1", "true"}
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        asked.status = 200
        stream = _Stream(resource)
        self._streams.add(stream)
        loop = asyncio.get_running_loop()
        ends = loop.time() + float(request.query.get("timeoutSeconds") or 1800)
        mark, sent = loop.time() + self._bookmarks, -1
        if given in {"", "0"}:
            sent = self.objects.version
            for item in self.objects.list(resource, asked.namespace):
                if fits(item):
                    await _line(answer, "ADDED", item)
        else:
            sent = int(given)
        try:
            while not stream.closed and loop.time() < ends:
                if resource.plural not in self._frozen:
                    if sent < self.objects.compacted:
                        stream.error = 410
                        break
                    changes = self.objects.since(sent)
                    sent += len(changes)
                    for change in changes:
                        await _send_change(answer, change, resource, asked.namespace, fits)
                    if marks and loop.time() >= mark:
                        mark = loop.time() + self._bookmarks
                        await _line(answer, "BOOKMARK", _bookmark(resource, sent))
                if sent >= self.objects.version or resource.plural in self._frozen:
                    await self._rung(min(ends, mark if mark > loop.time() else ends) - loop.time())
            if stream.error is not None:
                await _line(answer, "ERROR", Refused(stream.error, "too old resource version").body())
        finally:
            self._streams.discard(stream)
        return answer


def _selected(request: web.Request) -> Callable[[Object], bool]:
    labels = selector(request.query.get("labelSelector", ""))
    fields = field_selector(request.query.get("fieldSelector", ""))
    return lambda given: labels(given) and fields(given)


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        return None
    return yaml.safe_load(raw) if request.content_type == APPLY and raw[:1] != b"{" else json.loads(raw)


def _answer(status: int, body: Object, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer, without a charset, as the real API server sends it."""
    return web.Response(
        status=status, body=json.dumps(body).encode(), headers={"Content-Type": "application/json", **(headers or {})}
    )


def _resource_list(served: list[Resource]) -> Object | None:
    if not served:
        return None
    listed: list[Object] = []
    for item in served:
        verbs = (
            ["create"]
            if item.plural.endswith("reviews")
            else ["create", "delete", "get", "list", "patch", "update", "watch"]
        )
        made = {
            "name": item.plural,
            "singularName": item.kind.lower(),
            "namespaced": item.namespaced,
            "kind": item.kind,
        }
        listed.append({**made, "verbs": verbs})
        if item.status:
            listed.append({**made, "name": f"{item.plural}/status", "verbs": ["get", "patch", "update"]})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": served[0].api_version,
        "resources": listed,
    }


async def _line(answer: web.StreamResponse, kind: str, given: Object) -> None:
    await answer.write(json.dumps({"type": kind, "object": given}).encode() + b"\n")


async def _send_change(
    answer: web.StreamResponse, change: Change, resource: Resource, namespace: str, fits: Callable[[Object], bool]
) -> None:
    """Sends a change to a stream with a selector: an object that no longer matches is sent as deleted."""
    here = namespace in {"", change.after["metadata"].get("namespace", "")}
    if change.lost or change.resource.full != resource.full or not here:
        return
    was = change.before is not None and fits(change.before)
    is_now = change.type != "DELETED" and fits(change.after)
    if was or is_now:
        await _line(answer, "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED", change.after)


def _bookmark(resource: Resource, version: int) -> Object:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"resourceVersion": str(version)}}


def _tested(live: Object, operations: Sequence[Object]) -> Object:
    """Carries out a JSON patch of tests alone."""
    for item in operations:
        if item["op"] != "test":
            raise Refused(400, "the fake knows JSON patches of tests alone")
        here: Any = live
        for part in item["path"].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                here = here[int(name) if isinstance(here, list) else name]
            except (KeyError, IndexError):
                raise Refused(422, f"the server rejected our request: {item['path']}: missing value") from None
        if here != item["value"]:
            raise Refused(422, f"the server rejected our request: testing path {item['path']}: test failed")
    return live
