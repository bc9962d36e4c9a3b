"""A fake Kubernetes: an API server on loopback that a real operator with a real client runs against, with no cluster.

It speaks the API as clients see it: discovery, lists in pages, watch streams with bookmarks, server-side apply with its managed fields,
resource versions, generations, the status subresource, custom resources by the schema of their definition, and the deletion of what an
object owns. And it fails when a test wants it to:

    async with FakeKubernetes() as cluster:
        cluster.create("customresourcedefinitions", definition)
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path)))
        ...                                                      # start what is to be tested; it finds an API server
        cluster.fail("patch", "deployments", status=503, times=3)
        cluster.freeze("pods")                                   # its watch streams stay open and say nothing
        await cluster.until(lambda: cluster.find("deployments", "team-a", "web"), "a Deployment is made")
        assert cluster.requests("patch", "deployments")[-1].status == 201

A test reads and changes objects by plain calls (`get`, `create`, `edit`, `delete`), from the loop that the server runs in. `Controllers`
plays what is behind the API: it makes pods of StatefulSets and Deployments, and a test says what becomes of each.

What it does not do, so that nobody takes a pass here for more than it is: it checks no token and no namespace, runs no admission and no
CEL rules, fills in no defaults of built-in kinds, and takes every list of an object as one value (Kubernetes merges some by their keys).
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast
from uuid import uuid4

import yaml
from aiohttp import web
from jsonschema import Draft4Validator

__all__ = ["BUILT_IN", "Change", "Controllers", "FakeKubernetes", "Fault", "Refused", "Request", "Resource"]

Object = dict[str, Any]
Place = tuple[str, ...]
"""The way to a field, through maps."""
Found = TypeVar("Found")
REASONS: Mapping[int, str] = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict",
    410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip
OWN_METADATA = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"}
)
"""What the server writes of an object, and nobody owns."""
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
WRITING = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object that is served."""

    group: str = ""
    version: str = "v1"
    kind: str
    plural: str
    namespaced: bool = True
    status: bool = False
    """Whether the status is a subresource: then nothing else writes it."""
    generation: bool = False
    """Whether changes of the spec are counted."""
    fixed: tuple[str, ...] = ()
    """Fields that cannot change, as `spec.selector`."""
    schema: Mapping[str, Any] | None = None
    """OpenAPI; unknown fields are dropped, defaults filled in, what does not fit refused."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full(self) -> str:
        """As in messages: `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_OF_STATEFUL_SET = ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates")
_OF_EVENT = (
    "regarding",
    "related",
    "reason",
    "action",
    "note",
    "type",
    "eventTime",
    "reportingController",
    "reportingInstance",
)
BUILT_IN: tuple[Resource, ...] = (
    Resource(kind="Namespace", plural="namespaces", namespaced=False, status=True),
    Resource(kind="Node", plural="nodes", namespaced=False, status=True),
    Resource(kind="Pod", plural="pods", status=True),
    Resource(kind="Secret", plural="secrets"),
    Resource(kind="ConfigMap", plural="configmaps"),
    Resource(kind="ServiceAccount", plural="serviceaccounts"),
    Resource(kind="Service", plural="services", status=True),
    Resource(kind="PersistentVolumeClaim", plural="persistentvolumeclaims", status=True),
    Resource(group="apps", kind="StatefulSet", plural="statefulsets", status=True, generation=True, fixed=_OF_STATEFUL_SET),
    Resource(group="apps", kind="Deployment", plural="deployments", status=True, generation=True, fixed=("spec.selector",)),
    Resource(group="policy", kind="PodDisruptionBudget", plural="poddisruptionbudgets", status=True, generation=True),
    Resource(group="networking.k8s.io", kind="NetworkPolicy", plural="networkpolicies", generation=True),
    Resource(group="coordination.k8s.io", kind="Lease", plural="leases"),
    Resource(group="events.k8s.io", kind="Event", plural="events", fixed=_OF_EVENT),
    Resource(kind="Event", plural="events"),
    Resource(
        group="authorization.k8s.io",
        kind="SelfSubjectAccessReview",
        plural="selfsubjectaccessreviews",
        namespaced=False,
    ),
    Resource(
        group="apiextensions.k8s.io",
        kind="CustomResourceDefinition",
        plural="customresourcedefinitions",
        namespaced=False,
        status=True,
        generation=True,
    ),
)  # fmt: skip
"""Served from the start; a CustomResourceDefinition that is created adds its own."""


class Refused(Exception):
    """What the server answers instead of doing what it was asked."""

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        self.reason = reason or REASONS.get(status, "Unknown")

    def body(self) -> Object:
        """As a Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one object: what a watch stream tells."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    resource: Resource
    before: Object | None
    after: Object
    """For a deletion, the object as it was last."""
    lost: bool = False
    """Whether no stream tells it."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A request that was received."""

    verb: str
    """As RBAC names it: get, list, watch, create, update, patch, delete."""
    resource: str
    """With its subresource: `deployments`, `agentrljobs/status`."""
    namespace: str
    name: str
    user: str
    """Who: the bearer token as it was sent, since tokens are not checked."""
    at: float
    """By the loop's clock."""
    body: Any = None
    status: int = 0
    """What was answered; 0 while nothing is."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong with requests of a kind."""

    verb: str = "*"
    resource: str = "*"
    user: str | None = None
    name: str | None = None
    status: int | None = None
    """What is answered instead; None: the real answer."""
    message: str = "the fake API server was told to fail"
    retry_after: float | None = None
    """Seconds, as the header of a 429 says."""
    delay: float = 0.0
    """Seconds before the answer."""
    late: bool = False
    """Whether the request is carried out before the delay or the failure: then only the answer is late, or lost."""
    drop: bool = False
    """Whether the connection is closed without an answer."""
    left: int | None = None
    """Requests that it still meets; None for all until `end`."""
    hits: int = 0

    def end(self) -> None:
        """Meets no more requests."""
        self.left = 0

    def meets(self, asked: Request) -> bool:
        return (
            self.left != 0
            and self.verb in {"*", asked.verb}
            and self.resource in {"*", asked.resource}
            and self.user in {None, asked.user}
            and self.name in {None, asked.name}
        )

    def hit(self) -> None:
        self.hits += 1
        if self.left is not None:
            self.left -= 1


# Fields: who owns what, and how an object is merged. Pure.


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all that an object says: lists and empty maps are values, as numbers are."""
    if isinstance(value, dict) and (value or not place):
        for name, inner in cast("Object", value).items():
            yield from leaves(inner, (*place, name))
    else:
        yield place


def _owned(given: Object) -> set[Place]:
    """What who writes an object owns of it."""
    return {
        place
        for place in leaves(given)
        if place[0] not in {"apiVersion", "kind"} and not (place[0] == "metadata" and {*place[1:2]} <= OWN_METADATA)
    }


def _at(given: Any, place: Place) -> Any:
    for name in place:
        if not isinstance(given, dict) or name not in given:
            return None
        given = cast("Object", given)[name]
    return given


def _cut(given: Object, place: Place) -> None:
    """Removes a field, and maps above it that are empty then."""
    above = _at(given, place[:-1])
    if isinstance(above, dict) and place[-1] in above:
        del above[place[-1]]
        if not above and len(place) > 1:
            _cut(given, place[:-1])


def merged(base: Any, change: Any, *, null_removes: bool) -> Any:
    """A map with the changes over it; anything else is the change itself."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    made: Object = dict(cast("Object", base)) if isinstance(base, dict) else {}
    for name, inner in cast("Object", change).items():
        if inner is None and null_removes:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), inner, null_removes=null_removes)
    return made


def _written_fields(places: set[Place]) -> Object:
    """As fieldsV1."""
    made: Object = {}
    for place in sorted(places):
        here = made
        for name in place:
            here = here.setdefault(f"f:{name}", {})
    return made


def _read_fields(given: Object, place: Place = ()) -> Iterator[Place]:
    if not given and place:
        yield place
    for name, inner in given.items():
        yield from _read_fields(inner, (*place, name.removeprefix("f:")))


@dataclass(slots=True)
class _Ownership:
    """The managed fields of an object while it is changed."""

    sets: dict[tuple[str, str, str], set[Place]]
    """By manager, operation and subresource."""

    @classmethod
    def of(cls, given: Object) -> _Ownership:
        entries: list[Object] = given.get("metadata", {}).get("managedFields", [])
        return cls(
            {
                (item["manager"], item["operation"], item.get("subresource", "")): set(_read_fields(item["fieldsV1"]))
                for item in entries
            }
        )

    def written(self, api_version: str, before: Object) -> list[Object]:
        """As entries; one that says what it said keeps its time."""
        old = {
            (item["manager"], item["operation"], item.get("subresource", "")): item
            for item in before.get("metadata", {}).get("managedFields", [])
        }
        listed: list[Object] = []
        for (manager, operation, subresource), places in self.sets.items():
            if not places:
                continue
            made: Object = {
                "manager": manager,
                "operation": operation,
                "apiVersion": api_version,
                "fieldsType": "FieldsV1",
                "fieldsV1": _written_fields(places),
                **({"subresource": subresource} if subresource else {}),
            }
            known = old.get((manager, operation, subresource))
            same = known is not None and known["fieldsV1"] == made["fieldsV1"]
            listed.append({**made, "time": known["time"] if same and known else now()})
        return listed

    def take(self, who: tuple[str, str, str], places: set[Place]) -> None:
        """These are this one's and nobody else's."""
        for other, theirs in self.sets.items():
            if other != who:
                theirs -= places

    def others(self, who: tuple[str, str, str]) -> set[Place]:
        return {place for other, places in self.sets.items() if other != who for place in places}


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def selector(text: str) -> Callable[[Object], bool]:
    """A label selector: equality and existence, as `a=b,c!=d,e,!f`.

    Raises:
        Refused: It is of another kind.
    """
    if "(" in text:
        raise Refused(400, f"the fake knows no set-based selectors: {text!r}")
    terms = [term.strip() for term in text.split(",") if term.strip()]

    def fits(given: Object) -> bool:
        labels: Mapping[str, str] = given["metadata"].get("labels", {})
        for term in terms:
            if "!=" in term:
                name, _, value = term.partition("!=")
                good = labels.get(name) != value
            elif "=" in term:
                name, _, value = term.partition("=")
                good = labels.get(name) == value.removeprefix("=")
            else:
                good = (term.removeprefix("!") in labels) != term.startswith("!")
            if not good:
                return False
        return True

    return fits


def field_selector(text: str) -> Callable[[Object], bool]:
    """A field selector: equality, as `metadata.name=a,reason=b`."""
    terms = [term.partition("=") for term in text.split(",") if term]

    def fits(given: Object) -> bool:
        return all(str(_at(given, tuple(name.split(".")))) == value.removeprefix("=") for name, _, value in terms)

    return fits


def fitted(given: Any, schema: Mapping[str, Any]) -> Any:
    """A value as a structural schema wants it: unknown fields dropped, defaults filled in."""
    kind, value = schema.get("type"), given
    if kind == "array" and isinstance(given, list) and "items" in schema:
        return [fitted(item, schema["items"]) for item in value]
    if kind != "object" or not isinstance(given, dict):
        return value
    known: Mapping[str, Any] | None = schema.get("properties")
    rest: Mapping[str, Any] | None = schema.get("additionalProperties")
    if known is None:
        return value if rest is None else {name: fitted(item, rest) for name, item in value.items()}
    keeps = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    made: Object = {name: item for name, item in value.items() if keeps and name not in known}
    for name, inner in known.items():
        item = value.get(name, copy.deepcopy(inner.get("default")))
        if item is not None:
            made[name] = fitted(item, inner)
    return made


class Objects:
    """What the API server holds, by its rules. No network."""

    def __init__(self) -> None:
        self.resources: dict[tuple[str, str], Resource] = {(item.group, item.plural): item for item in BUILT_IN}
        self._items: dict[tuple[str, str, str], Object] = {}
        """By full plural, namespace and name."""
        self.version = 1000
        self.compacted = self.version
        """Changes up to this version are not remembered any more."""
        self.history: list[Change] = []
        self.lost: Counter[str] = Counter()
        """By plural: so many of the next changes are told by no stream."""
        self.lingering = False
        """Whether a deleted pod stays, marked, until `remove` ends it."""
        self.told: list[Callable[[Change], None]] = []
        """Called at every change."""

    def resource(self, name: str) -> Resource:
        """By plural, or by `plural.group`, or `plural.` for the core group, where two groups have one.

        Raises:
            KeyError: It is not served.
        """
        for item in self.resources.values():
            if name in {item.plural, item.full, f"{item.plural}.{item.group}"}:
                return item
        raise KeyError(f"{name} is not served")

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        return [
            item
            for (kind, place, _), item in sorted(self._items.items(), key=lambda pair: pair[0][1:])
            if kind == resource.full and namespace in {"", place}
        ]

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self._items.get((resource.full, namespace, name))
        if found is None:
            raise Refused(404, f'{resource.full} "{name}" not found')
        return found

    def since(self, version: int) -> Sequence[Change]:
        """Changes after a version."""
        return self.history[version - self.compacted :]

    def compact(self) -> None:
        """Forgets all changes so far: who asks for what came after an older version is told that it is gone."""
        self.compacted = self.version
        self.history.clear()

    def create(
        self, resource: Resource, namespace: str, given: Object, manager: str, *, own_status: bool = False
    ) -> Object:
        """Makes an object. Its status is dropped where that is a subresource, unless `own_status`."""
        made = copy.deepcopy(given)
        metadata = made.setdefault("metadata", {})
        metadata.setdefault("name", f"{metadata.get('generateName', '')}{uuid4().hex[:5]}")
        if (resource.full, namespace, metadata["name"]) in self._items:
            raise Refused(409, f'{resource.full} "{metadata["name"]}" already exists', reason="AlreadyExists")
        if resource.status and not own_status:
            made.pop("status", None)
        for name in OWN_METADATA - {"name"}:
            metadata.pop(name, None)
        metadata |= {"uid": str(uuid4()), "creationTimestamp": now()}
        if resource.namespaced:
            metadata["namespace"] = namespace
        if resource.generation:
            metadata["generation"] = 1
        made = self._checked(resource, {"apiVersion": resource.api_version, "kind": resource.kind, **made})
        owners = _Ownership({(manager, "Update", ""): _owned(made)})
        made["metadata"]["managedFields"] = owners.written(resource.api_version, {})
        return self._stored(resource, None, made)

    def replace(self, resource: Resource, namespace: str, given: Object, manager: str, subresource: str = "") -> Object:
        """Writes an object whole, or its status."""
        name = given["metadata"]["name"]
        live = self.get(resource, namespace, name)
        self._same(resource, live, given)
        return self._updated(resource, live, copy.deepcopy(given), manager, subresource)

    def merge(
        self, resource: Resource, namespace: str, name: str, changes: Object, manager: str, subresource: str = ""
    ) -> Object:
        """A merge patch."""
        live = self.get(resource, namespace, name)
        self._same(resource, live, changes)
        return self._updated(resource, live, merged(live, changes, null_removes=True), manager, subresource)

    def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        given: Object,
        manager: str,
        *,
        force: bool,
        subresource: str = "",
    ) -> tuple[Object, bool]:
        """Server-side apply; the object, and whether it was made."""
        wanted = _converted(copy.deepcopy(given))
        live = self._items.get((resource.full, namespace, name))
        if live is None:
            if subresource:
                raise Refused(404, f'{resource.full} "{name}" not found')
            if wanted["metadata"].get("uid"):
                raise Refused(
                    409, f"Precondition failed: UID in precondition: {wanted['metadata']['uid']}, UID in object meta: "
                )
            made = self.create(
                resource, namespace, {**wanted, "metadata": {**wanted["metadata"], "name": name}}, manager
            )
            owned = _owned(wanted) & _owned(made)
            entries = _Ownership({(manager, "Apply", ""): owned}).written(resource.api_version, {})
            made["metadata"]["managedFields"] = entries
            return made, True
        self._same(resource, live, wanted)
        who = (manager, "Apply", subresource)
        owners = _Ownership.of(live)
        if subresource == "status":
            wanted = {"status": wanted.get("status", {})}
        elif resource.status:
            wanted.pop("status", None)
        places = _owned(wanted)
        clashing = {place for place in places & owners.others(who) if _at(live, place) != _at(wanted, place)}
        if clashing and not force:
            raise Refused(
                409, f"Apply failed with {len(clashing)} conflicts: {', '.join('.'.join(p) for p in sorted(clashing))}"
            )
        made, theirs = copy.deepcopy(live), owners.others(who)
        for place in owners.sets.get(who, set()) - places:
            if not any(other[: len(place)] == place for other in theirs):
                _cut(made, place)
        made = merged(made, wanted, null_removes=False)
        owners.take(who, clashing)
        owners.sets[who] = places
        return self._changed(resource, live, made, owners), False

    def delete(self, resource: Resource, namespace: str, name: str, *, uid: str = "", orphan: bool = False) -> Object:
        """Deletes an object and what it owns; one with finalizers, and a pod that lingers, is only marked."""
        live = self.get(resource, namespace, name)
        if uid and live["metadata"]["uid"] != uid:
            raise Refused(
                409, f"Precondition failed: UID in precondition: {uid}, UID in object meta: {live['metadata']['uid']}"
            )
        if live["metadata"].get("finalizers") or (self.lingering and resource.plural == "pods"):
            if "deletionTimestamp" in live["metadata"]:
                return live
            marked = {
                **live,
                "metadata": {**live["metadata"], "deletionTimestamp": now(), "deletionGracePeriodSeconds": 30},
            }
            return self._stored(resource, live, marked)
        return self.remove(resource, namespace, name, orphan=orphan)

    def remove(self, resource: Resource, namespace: str, name: str, *, orphan: bool = False) -> Object:
        """Ends an object at once, whatever holds it; the garbage collector follows."""
        gone = self._items.pop((resource.full, namespace, name))
        told = {**gone, "metadata": {**gone["metadata"], "resourceVersion": self._next()}}
        self._tell("DELETED", resource, gone, told)
        if resource.plural == "customresourcedefinitions":
            self.resources.pop((gone["spec"]["group"], gone["spec"]["names"]["plural"]), None)
        self._collect(gone["metadata"]["uid"], orphan=orphan)
        return told

    def _collect(self, uid: str, *, orphan: bool) -> None:
        for (full, namespace, name), item in list(self._items.items()):
            owners: list[Object] = item["metadata"].get("ownerReferences", [])
            left = [owner for owner in owners if owner["uid"] != uid]
            if len(left) == len(owners) or (full, namespace, name) not in self._items:
                continue
            resource = self.resource(full)
            if left or orphan:
                changes = {"metadata": {"ownerReferences": left or None}}
                self.merge(resource, namespace, name, changes, "garbage-collector")
            else:
                self.delete(resource, namespace, name)

    def collect_orphans(self) -> None:
        """Deletes what names an owner that is not there: it was made after the owner's deletion."""
        alive = {item["metadata"]["uid"] for item in self._items.values()}
        named = {owner["uid"] for item in self._items.values() for owner in item["metadata"].get("ownerReferences", [])}
        for uid in named - alive:
            self._collect(uid, orphan=False)

    def _same(self, resource: Resource, live: Object, given: Object) -> None:
        """Whether a write means this very object, as it is now."""
        metadata: Object = given.get("metadata", {})
        uid, version = metadata.get("uid"), metadata.get("resourceVersion")
        if uid and uid != live["metadata"]["uid"]:
            raise Refused(
                409, f"Precondition failed: UID in precondition: {uid}, UID in object meta: {live['metadata']['uid']}"
            )
        if version and version != live["metadata"]["resourceVersion"]:
            raise Refused(
                409,
                f'Operation cannot be fulfilled on {resource.full} "{live["metadata"]["name"]}": the object has been modified; '
                "please apply your changes to the latest version and try again",
            )

    def _updated(self, resource: Resource, live: Object, made: Object, manager: str, subresource: str) -> Object:
        if subresource == "status":
            made = {**live, **({"status": made["status"]} if "status" in made else {})}
        elif resource.status:
            made.pop("status", None)
            made |= {"status": live["status"]} if "status" in live else {}
        owners, who = _Ownership.of(live), (manager, "Update", subresource)
        was, will = _owned(live), _owned(_converted(made))
        different = {place for place in was | will if _at(live, place) != _at(made, place)}
        owners.take(who, different)
        owners.sets[who] = (owners.sets.get(who, set()) | different) & will
        return self._changed(resource, live, made, owners)

    def _changed(self, resource: Resource, live: Object, made: Object, owners: _Ownership) -> Object:
        """Stores a new state if it is one."""
        metadata = {name: item for name, item in made.get("metadata", {}).items() if name not in OWN_METADATA}
        kept = {name: item for name, item in live["metadata"].items() if name in OWN_METADATA}
        made = self._checked(resource, {**_converted(made), "metadata": {**metadata, **kept}})
        for path in resource.fixed:
            if _at(live, tuple(path.split("."))) != _at(made, tuple(path.split("."))):
                name = kept["name"]
                raise Refused(
                    422,
                    f'{resource.kind}.{resource.group} "{name}" is invalid: {path}: Invalid value: field is immutable',
                )
        if resource.generation and live.get("spec") != made.get("spec"):
            made["metadata"]["generation"] = live["metadata"]["generation"] + 1
        made["metadata"]["managedFields"] = owners.written(resource.api_version, live)
        if made == live:
            return live
        if (
            "deletionTimestamp" in made["metadata"]
            and not made["metadata"].get("finalizers")
            and resource.plural != "pods"
        ):
            return self.remove(resource, kept.get("namespace", ""), kept["name"])
        return self._stored(resource, live, made)

    def _checked(self, resource: Resource, given: Object) -> Object:
        if resource.schema is None:
            return _converted(given)
        loose = {"metadata": given["metadata"], "apiVersion": given["apiVersion"], "kind": given["kind"]}
        made = {**fitted(given, resource.schema), **loose}
        validator: Any = Draft4Validator(cast("Any", resource.schema))  # OpenAPI's bounds are those of draft 4
        wrong: list[Any] = sorted(validator.iter_errors(made), key=lambda item: str(item.path))
        if wrong:
            told = ", ".join(f"{'.'.join(map(str, item.path))}: Invalid value: {item.message}" for item in wrong)
            raise Refused(422, f'{resource.kind}.{resource.group} "{given["metadata"]["name"]}" is invalid: {told}')
        return made

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _stored(self, resource: Resource, before: Object | None, made: Object) -> Object:
        made["metadata"]["resourceVersion"] = self._next()
        self._items[resource.full, made["metadata"].get("namespace", ""), made["metadata"]["name"]] = made
        if resource.plural == "customresourcedefinitions":
            self._serve(made)
        self._tell("ADDED" if before is None else "MODIFIED", resource, before, made)
        return made

    def _tell(
        self, kind: Literal["ADDED", "MODIFIED", "DELETED"], resource: Resource, before: Object | None, after: Object
    ) -> None:
        lost = self.lost[resource.plural] > 0
        self.lost[resource.plural] -= int(lost)
        change = Change(version=self.version, type=kind, resource=resource, before=before, after=after, lost=lost)
        self.history.append(change)
        for tell in list(self.told):
            tell(change)

    def _serve(self, definition: Object) -> None:
        """A CustomResourceDefinition's kind."""
        spec = definition["spec"]
        version = next(item for item in spec["versions"] if item["storage"])
        self.resources[spec["group"], spec["names"]["plural"]] = Resource(
            group=spec["group"],
            version=version["name"],
            kind=spec["names"]["kind"],
            plural=spec["names"]["plural"],
            namespaced=spec["scope"] == "Namespaced",
            status="status" in version.get("subresources", {}),
            generation=True,
            schema=version["schema"]["openAPIV3Schema"],
        )


def _converted(given: Object) -> Object:
    """A Secret's stringData is kept as data."""
    if given.get("kind") != "Secret" or "stringData" not in given:
        return given
    coded = {name: base64.b64encode(text.encode()).decode() for name, text in given["stringData"].items()}
    rest = {name: item for name, item in given.items() if name != "stringData"}
    return {**rest, "data": {**given.get("data", {}), **coded}}


@dataclass(slots=True, eq=False)
class _Stream:
    """An open watch."""

    resource: Resource
    closed: bool = False
    error: int | None = None


class FakeKubernetes:
    """The server. `async with` starts it on an ephemeral port of 127.0.0.1."""

    def __init__(self, *, bookmark_seconds: float = 60.0, denied: Sequence[tuple[str, str]] = ()) -> None:
        """Nothing listens before `start`.

        Args:
            bookmark_seconds: How often a quiet watch stream that asked for it is told where it is.
            denied: Verbs and resources that nobody may, as `("patch", "agentrljobs/status")`: an access review says so, and so does
                the request itself, with 403.
        """
        self.objects = Objects()
        self.objects.told.append(lambda _: self._wake())
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
    ) -> list[Request]:
        """Requests received, in order."""
        wanted = Fault(verb=verb, resource=resource, user=user, name=name)
        return [item for item in self.log if wanted.meets(item)]

    def writes(self, *, user: str | None = None) -> list[Request]:
        """Requests that write, but for leases and access reviews: what an operator does to people's objects."""
        aside = {"leases", "selfsubjectaccessreviews"}
        return [item for item in self.requests(user=user) if item.verb in WRITING and item.resource not in aside]

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
        """What a request asks for; None where its path names no resource."""
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
        )
        return asked, (resource, subresource)

    def _discovered(self, parts: list[str]) -> Object | None:
        """What `/version`, `/api` and `/apis` tell."""
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
        if request.query.get("dryRun"):
            raise Refused(400, "the fake knows no dry run")
        if asked.verb == "watch":
            return await self._watched(request, asked, resource)
        if asked.verb == "list":
            return _answer(200, self._listed(request, asked, resource))
        status, made = self._carried_out(request, asked, resource, subresource)
        return _answer(status, made)

    def _carried_out(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str
    ) -> tuple[int, Object]:
        """A request for one object."""
        if subresource and not (subresource == "status" and resource.status):
            raise Refused(404, "the server could not find the requested resource")
        objects, body = self.objects, asked.body
        manager = request.query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0]
        if asked.verb == "get":
            return 200, objects.get(resource, asked.namespace, asked.name)
        if asked.verb == "create":
            if resource.plural == "selfsubjectaccessreviews":
                return 201, self._reviewed(body)
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
            uid = options.get("preconditions", {}).get("uid", "")
            return 200, objects.delete(resource, asked.namespace, asked.name, uid=uid, orphan=orphan)
        return self._patched(request, asked, resource, subresource, manager)

    def _patched(
        self, request: web.Request, asked: Request, resource: Resource, subresource: str, manager: str
    ) -> tuple[int, Object]:
        if request.content_type == MERGE:
            made = self.objects.merge(resource, asked.namespace, asked.name, asked.body, manager, subresource)
            return 200, made
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
        )
        if new:
            self._collect_soon()
        return 201 if new else 200, made

    def _collect_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.objects.collect_orphans)

    def _reviewed(self, body: Object) -> Object:
        """An access review: what is not denied is allowed."""
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
        if resource.schema is None:  # as in earnest: what is in a list of a built-in kind does not name it
            page = [{name: item[name] for name in item if name not in {"apiVersion", "kind"}} for item in page]
        metadata: Object = {"resourceVersion": version}
        if rest:
            metadata |= {"continue": uuid4().hex, "remainingItemCount": len(rest)}
            self._pages[metadata["continue"]] = (rest, version)
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
        mark, told = loop.time() + self._bookmarks, -1
        if given in {"", "0"}:
            told = self.objects.version
            for item in self.objects.list(resource, asked.namespace):
                if fits(item):
                    await _line(answer, "ADDED", item)
        else:
            told = int(given)
        try:
            while not stream.closed and loop.time() < ends:
                if resource.plural not in self._frozen:
                    if told < self.objects.compacted:
                        stream.error = 410
                        break
                    changes = self.objects.since(told)
                    told += len(changes)
                    for change in changes:
                        await _tell_change(answer, change, resource, asked.namespace, fits)
                    if marks and loop.time() >= mark:
                        mark = loop.time() + self._bookmarks
                        await _line(answer, "BOOKMARK", _bookmark(resource, told))
                if told >= self.objects.version or resource.plural in self._frozen:
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
    """Kubernetes names no charset, and clients look."""
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


async def _tell_change(
    answer: web.StreamResponse, change: Change, resource: Resource, namespace: str, fits: Callable[[Object], bool]
) -> None:
    """A change as a stream with this selector sees it: an object that fits no more is deleted for it."""
    here = namespace in {"", change.after["metadata"].get("namespace", "")}
    if change.lost or change.resource.full != resource.full or not here:
        return
    was = change.before is not None and fits(change.before)
    is_now = change.type != "DELETED" and fits(change.after)
    if was or is_now:
        await _line(answer, "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED", change.after)


def _bookmark(resource: Resource, version: int) -> Object:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"resourceVersion": str(version)}}


class Controllers:
    """What is behind the API, as far as pods show it: the controllers of StatefulSets and Deployments, the scheduler, the kubelets.

    Pods follow their workloads by themselves: made, replaced when the template changes, deleted when there are too many. A pod is
    Pending when it is made, or what `started` makes of it; from then on the test says what becomes of it.
    """

    def __init__(
        self, cluster: FakeKubernetes, *, started: Callable[[Controllers, Object], None] | None = None
    ) -> None:
        """Follows workloads from now on.

        Args:
            cluster: The server.
            started: Called with every new pod, as `lambda controllers, pod: controllers.run(pod)`.
        """
        self._cluster, self._started = cluster, started
        self._addresses = 0
        self._due = False
        cluster.objects.told.append(self._seen)

    def _seen(self, change: Change) -> None:
        if change.resource.plural in {"statefulsets", "deployments", "pods"} and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.sync)

    def sync(self) -> None:
        """Makes pods what the workloads want."""
        self._due = False
        for plural in ("statefulsets", "deployments"):
            for workload in self._cluster.objects.list(self._cluster.objects.resource(plural)):
                self._sync(plural, workload)

    def pods(self, namespace: str, workload: str) -> list[Object]:
        """The pods of a workload by its name, as copies."""
        return copy.deepcopy(self._pods(namespace, workload))

    def _pods(self, namespace: str, workload: str) -> list[Object]:
        objects = self._cluster.objects
        return [
            pod
            for pod in objects.list(objects.resource("pods"), namespace)
            if any(owner["name"] == workload for owner in pod["metadata"].get("ownerReferences", []))
        ]

    def _sync(self, plural: str, workload: Object) -> None:
        metadata, spec = workload["metadata"], workload["spec"]
        namespace, name = metadata["namespace"], metadata["name"]
        mark = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:8]
        prefix = name if plural == "statefulsets" else f"{name}-{mark}"
        wanted = [f"{prefix}-{index}" for index in range(spec.get("replicas", 1))]
        for pod in self._pods(namespace, name):
            fits = pod["metadata"]["name"] in wanted and pod["metadata"]["labels"].get("pod-template-hash") == mark
            if not fits and "deletionTimestamp" not in pod["metadata"]:
                self._cluster.delete("pods", namespace, pod["metadata"]["name"])
        for index, pod_name in enumerate(wanted):
            if self._cluster.find("pods", namespace, pod_name) is None:
                self._make(workload, pod_name, index, mark)
        ready = len([pod for pod in self._pods(namespace, name) if _is_ready(pod)])
        status = {"replicas": len(wanted), "readyReplicas": ready, "observedGeneration": metadata["generation"]}
        self._cluster.edit(
            plural, namespace, name, {"status": status}, manager="kube-controller-manager", subresource="status"
        )

    def _make(self, workload: Object, name: str, index: int, mark: str) -> None:
        template = workload["spec"]["template"]
        labels = {
            **template["metadata"].get("labels", {}),
            "pod-template-hash": mark,
            "apps.kubernetes.io/pod-index": str(index),
        }
        owner = {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": workload["metadata"]["name"],
            "uid": workload["metadata"]["uid"],
            "controller": True,
        }
        pod = self._cluster.create(
            "pods",
            {
                "metadata": {
                    "name": name,
                    "namespace": workload["metadata"]["namespace"],
                    "labels": labels,
                    "annotations": template["metadata"].get("annotations", {}),
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            },
            manager="kube-controller-manager",
        )
        if self._started is not None:
            self._started(self, pod)

    def run(self, pod: Object, *, address: str | None = None, ready: bool = True) -> None:
        """It has a node and an address, and its containers run."""
        self._addresses += 1
        containers = [
            {"name": item["name"], "ready": ready, "restartCount": 0, "state": {"running": {"startedAt": now()}}}
            for item in pod["spec"]["containers"]
        ]
        self._place(pod)
        self._tell(
            pod,
            phase="Running",
            podIP=address or f"10.244.0.{self._addresses}",
            containerStatuses=containers,
            initContainerStatuses=[],
            conditions=[_condition("PodScheduled"), _condition("Ready", "True" if ready else "False")],
        )

    def unschedulable(self, pod: Object, message: str) -> None:
        """The scheduler finds no node."""
        condition = _condition("PodScheduled", "False", reason="Unschedulable", message=message)
        self._tell(pod, phase="Pending", conditions=[condition])

    def image_missing(self, pod: Object, message: str, *, container: str | None = None) -> None:
        """An image cannot be pulled."""
        waiting = {"reason": "ImagePullBackOff", "message": message}
        name = container or pod["spec"]["containers"][0]["name"]
        self._place(pod)
        self._tell(
            pod,
            phase="Pending",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            containerStatuses=[{"name": name, "ready": False, "restartCount": 0, "state": {"waiting": waiting}}],
        )

    def init_failed(self, pod: Object, message: str, *, container: str | None = None, code: int = 2) -> None:
        """An init container ended with a failure, and its last words."""
        name = container or pod["spec"]["initContainers"][0]["name"]
        self._place(pod)
        self._tell(
            pod,
            phase="Pending",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            initContainerStatuses=[_ended(name, "Error", code, message, restarts=0)],
        )

    def crashed(
        self,
        pod: Object,
        message: str,
        *,
        container: str | None = None,
        reason: str = "Error",
        code: int = 1,
        restarts: int = 0,
    ) -> None:
        """A container ended with a failure; reason is Kubernetes' word, as OOMKilled."""
        name = container or pod["spec"]["containers"][0]["name"]
        self._place(pod)
        self._tell(
            pod,
            phase="Running",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            containerStatuses=[_ended(name, reason, code, message, restarts=restarts)],
        )

    def gone(self, pod: Object) -> None:
        """The kubelet has ended it: a pod that lingered after its deletion is there no more."""
        metadata = pod["metadata"]
        self._cluster.objects.remove(self._cluster.objects.resource("pods"), metadata["namespace"], metadata["name"])

    def _place(self, pod: Object) -> None:
        metadata = pod["metadata"]
        changes = {"spec": {"nodeName": "node-1"}}
        self._cluster.edit("pods", metadata["namespace"], metadata["name"], changes, manager="kube-scheduler")

    def _tell(self, pod: Object, **status: Any) -> None:
        metadata = pod["metadata"]
        self._cluster.edit(
            "pods", metadata["namespace"], metadata["name"], {"status": status}, manager="kubelet", subresource="status"
        )


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _condition(kind: str, status: str = "True", *, reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _ended(name: str, reason: str, code: int, message: str, *, restarts: int) -> Object:
    last = {"terminated": {"reason": reason, "exitCode": code, "message": message}}
    return {"name": name, "ready": False, "restartCount": restarts, "state": last}
