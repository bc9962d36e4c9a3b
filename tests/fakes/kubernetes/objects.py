"""The stored objects, and the rules by which they change."""

from __future__ import annotations

import base64
import copy
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast
from uuid import uuid4

from jsonschema import Draft4Validator
from tests.fakes.kubernetes.declared import undeclared
from tests.fakes.kubernetes.fields import Ownership, at_place, cut, fitted, fixed, merged, merged_by_keys, now, owned
from tests.fakes.kubernetes.resources import BUILT_IN, OWN_METADATA, Change, Object, Place, Refused, Resource


class Objects:
    """The objects of the API server and their rules, without the network."""

    def __init__(self) -> None:
        self.resources: dict[tuple[str, str], Resource] = {(item.group, item.plural): item for item in BUILT_IN}
        self._items: dict[tuple[str, str, str], Object] = {}
        """Objects by full plural, namespace and name."""
        self.version = 1000
        self.compacted = self.version
        """The version up to which changes are no longer kept."""
        self.history: list[Change] = []
        self.lost: Counter[str] = Counter()
        """Number of next changes that no stream delivers, by plural."""
        self.keep_deleted_pods = False
        """Whether a deleted pod stays, marked, until `remove` ends it."""
        self.collecting = True
        """Whether dependents are deleted at once with their owner; otherwise by `collect_orphans`, like a garbage
        collector with a delay."""
        self._dry = False
        """Whether the current request is a dry run."""
        self.listeners: list[Callable[[Change], None]] = []
        """Callbacks for every change."""

    def resource(self, name: str) -> Resource:
        """The resource of a plural, of `plural.group`, or of `plural.` for the core group, where two groups have the
        same plural.

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
        """Drops all changes so far: watches from an older version are answered with 410."""
        self.compacted = self.version
        self.history.clear()

    @contextmanager
    def rehearsed(self, dry_run: bool) -> Generator[None]:
        self._dry = dry_run
        try:
            yield
        finally:
            self._dry = False

    def create(
        self, resource: Resource, namespace: str, given: Object, manager: str, *, own_status: bool = False
    ) -> Object:
        """Creates an object. Its status is dropped where that is a subresource, unless `own_status`."""
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
        owners = Ownership({(manager, "Update", ""): owned(made)})
        made["metadata"]["managedFields"] = owners.written(resource.api_version, {})
        return self._stored(resource, None, made)

    def replace(self, resource: Resource, namespace: str, given: Object, manager: str, subresource: str = "") -> Object:
        """Replaces an object, or its status."""
        name = given["metadata"]["name"]
        live = self.get(resource, namespace, name)
        uid = given["metadata"].get("uid")
        if uid and uid != live["metadata"]["uid"]:
            raise _other(resource, live, uid)
        self._unchanged(resource, live, given)
        return self._updated(resource, live, copy.deepcopy(given), manager, subresource)

    def merge(
        self, resource: Resource, namespace: str, name: str, changes: Object, manager: str, subresource: str = ""
    ) -> Object:
        """Applies a merge patch."""
        live = self.get(resource, namespace, name)
        self._same(resource, live, changes, subresource)
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
        dry_run: bool = False,
    ) -> tuple[Object, bool]:
        """Applies an object server-side; returns the object, and whether it was created. A dry run is validated in the
        same way and changes nothing.
        """
        with self.rehearsed(dry_run):
            return self._applied(resource, namespace, name, given, manager, force=force, subresource=subresource)

    def _applied(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        given: Object,
        manager: str,
        *,
        force: bool,
        subresource: str,
    ) -> tuple[Object, bool]:
        wanted = _converted(copy.deepcopy(given))
        for field in undeclared(resource.kind, wanted):
            # As the real API server: a typed patch with a field that the kind does not declare is answered with 500.
            subject = f"{namespace}/{name}; {resource.api_version}, Kind={resource.kind}"
            raise Refused(
                500, f"failed to create typed patch object ({subject}): {field}: field not declared in schema"
            )
        live = self._items.get((resource.full, namespace, name))
        if live is None:
            if subresource:
                raise Refused(404, f'{resource.full} "{name}" not found')
            if wanted["metadata"].get("uid"):
                raise Refused(
                    409,
                    f'Operation cannot be fulfilled on {resource.full} "{name}": uid mismatch: the provided object '
                    "specified "
                    f"uid {wanted['metadata']['uid']}, and no existing object was found",
                )
            made = self.create(
                resource, namespace, {**wanted, "metadata": {**wanted["metadata"], "name": name}}, manager
            )
            ours = owned(wanted) & owned(made)
            entries = Ownership({(manager, "Apply", ""): ours}).written(resource.api_version, {})
            made["metadata"]["managedFields"] = entries
            return made, True
        self._same(resource, live, wanted, subresource)
        who = (manager, "Apply", subresource)
        owners = Ownership.of(live)
        if subresource == "status":
            wanted = {"status": wanted.get("status", {})}
        elif resource.status:
            wanted.pop("status", None)
        places = owned(wanted)
        clashing = {place for place in places & owners.others(who) if at_place(live, place) != at_place(wanted, place)}
        if clashing and not force:
            subject = f"{len(clashing)} conflict{'s' if len(clashing) > 1 else ''}"
            raise Refused(409, f"Apply failed with {subject}: {', '.join('.' + '.'.join(p) for p in sorted(clashing))}")
        made, theirs, before = copy.deepcopy(live), owners.others(who), owners.sets.get(who, set())
        for place in before - places:
            if not any(other[: len(place)] == place for other in theirs):
                cut(made, place)
        made = merged(made, wanted, null_removes=False)
        self._empty(resource, made, live, places, before)
        owners.take(who, clashing)
        owners.sets[who] = places
        return self._changed(resource, live, made, owners), False

    def delete(self, resource: Resource, namespace: str, name: str, *, uid: str = "", orphan: bool = False) -> Object:
        """Deletes an object and its dependents. An object with finalizers is only marked, and so is a pod if deleted
        pods are kept.
        """
        live = self.get(resource, namespace, name)
        if uid and live["metadata"]["uid"] != uid:
            raise _other(resource, live, uid)
        if live["metadata"].get("finalizers") or (self.keep_deleted_pods and resource.plural == "pods"):
            if "deletionTimestamp" in live["metadata"]:
                return live
            marked = {
                **live,
                "metadata": {**live["metadata"], "deletionTimestamp": now(), "deletionGracePeriodSeconds": 30},
            }
            return self._stored(resource, live, marked)
        return self.remove(resource, namespace, name, orphan=orphan)

    def remove(self, resource: Resource, namespace: str, name: str, *, orphan: bool = False) -> Object:
        """Removes an object at once, whatever its finalizers; the garbage collector follows."""
        gone = self._items.pop((resource.full, namespace, name))
        last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": self._next()}}
        self._notify("DELETED", resource, gone, last)
        if resource.plural == "customresourcedefinitions":
            self.resources.pop((gone["spec"]["group"], gone["spec"]["names"]["plural"]), None)
        if self.collecting:
            self._collect(gone["metadata"]["uid"], orphan=orphan)
        return last

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
        """Deletes objects whose owner does not exist: they were created after its deletion."""
        alive = {item["metadata"]["uid"] for item in self._items.values()}
        named = {owner["uid"] for item in self._items.values() for owner in item["metadata"].get("ownerReferences", [])}
        for uid in named - alive:
            self._collect(uid, orphan=False)

    def _same(self, resource: Resource, live: Object, given: Object, subresource: str) -> None:
        """Whether a patch refers to this object in its current state. A status patch may name another uid, which is not
        checked.
        """
        uid = given.get("metadata", {}).get("uid")
        if uid and uid != live["metadata"]["uid"] and not subresource:
            name = live["metadata"]["name"]
            raise Refused(
                422, f'{_subject(resource, name)} is invalid: metadata.uid: Invalid value: "{uid}": field is immutable'
            )
        self._unchanged(resource, live, given)

    def _unchanged(self, resource: Resource, live: Object, given: Object) -> None:
        version = given.get("metadata", {}).get("resourceVersion")
        if version and version != live["metadata"]["resourceVersion"]:
            raise Refused(
                409,
                f'Operation cannot be fulfilled on {resource.full} "{live["metadata"]["name"]}": the object has been '
                "modified; "
                "please apply your changes to the latest version and try again",
            )

    def _empty(self, resource: Resource, made: Object, live: Object, places: set[Place], before: set[Place]) -> None:
        """Handles an empty value applied over a value as the real API server does (seen with 1.36): a map becomes null,
        and a list merged by keys is removed.
        """
        for place in places:
            value = at_place(made, place)
            was_map = any(old[: len(place)] == place and len(old) > len(place) for old in before)
            if value == {} and was_map and (resource.schema is None or place[0] == "metadata"):
                cut(made, place)
            elif value == {} and was_map:
                path = ".".join(place)
                reason = f'{path}: Invalid value: "null": {path} in body must be of type object: "null"'
                raise Refused(422, f"{_subject(resource, made['metadata']['name'])} is invalid: {reason}")
            elif value == [] and at_place(live, place) and merged_by_keys(resource.schema, place):
                cut(made, place)

    def _updated(self, resource: Resource, live: Object, made: Object, manager: str, subresource: str) -> Object:
        if subresource == "status":
            made = {**live, **({"status": made["status"]} if "status" in made else {})}
        elif resource.status:
            made.pop("status", None)
            made |= {"status": live["status"]} if "status" in live else {}
        owners, who = Ownership.of(live), (manager, "Update", subresource)
        was, will = owned(live), owned(_converted(made))
        different = {place for place in was | will if at_place(live, place) != at_place(made, place)}
        owners.take(who, different)
        owners.sets[who] = (owners.sets.get(who, set()) | different) & will
        return self._changed(resource, live, made, owners)

    def _changed(self, resource: Resource, live: Object, made: Object, owners: Ownership) -> Object:
        """Stores a new state if it differs."""
        metadata = {name: item for name, item in made.get("metadata", {}).items() if name not in OWN_METADATA}
        kept = {name: item for name, item in live["metadata"].items() if name in OWN_METADATA}
        made = self._checked(resource, {**_converted(made), "metadata": {**metadata, **kept}})
        for path in resource.fixed:
            if fixed(path, live, live) != fixed(path, live, made):
                name = kept["name"]
                raise Refused(422, f"{_subject(resource, name)} is invalid: {path}: Invalid value: field is immutable")
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
        validator: Any = Draft4Validator(cast("Any", resource.schema))  # OpenAPI uses the bounds of draft 4
        wrong: list[Any] = sorted(validator.iter_errors(made), key=lambda item: str(item.path))
        if wrong:
            reason = ", ".join(f"{'.'.join(map(str, item.path))}: Invalid value: {item.message}" for item in wrong)
            raise Refused(422, f"{_subject(resource, given['metadata']['name'])} is invalid: {reason}")
        return made

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _stored(self, resource: Resource, before: Object | None, made: Object) -> Object:
        if self._dry:
            made["metadata"].setdefault("resourceVersion", "")
            return made
        made["metadata"]["resourceVersion"] = self._next()
        self._items[resource.full, made["metadata"].get("namespace", ""), made["metadata"]["name"]] = made
        if resource.plural == "customresourcedefinitions":
            self._serve(made)
        self._notify("ADDED" if before is None else "MODIFIED", resource, before, made)
        return made

    def _notify(
        self, kind: Literal["ADDED", "MODIFIED", "DELETED"], resource: Resource, before: Object | None, after: Object
    ) -> None:
        lost = self.lost[resource.plural] > 0
        self.lost[resource.plural] -= int(lost)
        change = Change(version=self.version, type=kind, resource=resource, before=before, after=after, lost=lost)
        self.history.append(change)
        for listener in list(self.listeners):
            listener(change)

    def _serve(self, definition: Object) -> None:
        """Serves the kind of a CustomResourceDefinition."""
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


def _subject(resource: Resource, name: str) -> str:
    """The name of an object in messages."""
    return f'{resource.kind}{"." if resource.group else ""}{resource.group} "{name}"'


def _other(resource: Resource, live: Object, uid: str) -> Refused:
    """The error for a uid that is another object's."""
    return Refused(
        409,
        f'Operation cannot be fulfilled on {resource.full} "{live["metadata"]["name"]}": Precondition failed: UID in '
        "precondition: "
        f"{uid}, UID in object meta: {live['metadata']['uid']}",
    )


def _converted(given: Object) -> Object:
    """The object with a Secret's stringData converted to data."""
    if given.get("kind") != "Secret" or "stringData" not in given:
        return given
    coded = {name: base64.b64encode(text.encode()).decode() for name, text in given["stringData"].items()}
    rest = {name: item for name, item in given.items() if name != "stringData"}
    return {**rest, "data": {**given.get("data", {}), **coded}}
