"""Fields: their owners, and how an object is merged, selected and validated against a schema. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from tests.fakes.kubernetes.resources import OWN_METADATA, Object, Place, Refused


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """The paths of all values in an object; lists and empty maps count as values."""
    if isinstance(value, dict) and (value or not place):
        for name, inner in cast("Object", value).items():
            yield from leaves(inner, (*place, name))
    else:
        yield place


def owned(given: Object) -> set[Place]:
    """The fields that a writer of this object owns."""
    return {
        place
        for place in leaves(given)
        if place[0] not in {"apiVersion", "kind"} and not (place[0] == "metadata" and {*place[1:2]} <= OWN_METADATA)
    }


def at_place(given: Any, place: Place) -> Any:
    for name in place:
        if not isinstance(given, dict) or name not in given:
            return None
        given = cast("Object", given)[name]
    return given


def cut(given: Object, place: Place) -> None:
    """Removes a field, and the maps above it that become empty."""
    above = at_place(given, place[:-1])
    if isinstance(above, dict) and place[-1] in above:
        del above[place[-1]]
        if not above and len(place) > 1:
            cut(given, place[:-1])


def merged(base: Any, change: Any, *, null_removes: bool) -> Any:
    """A map with the changes merged into it; for other types, the change itself."""
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
    """Paths as fieldsV1."""
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
class Ownership:
    """The managed fields of an object while it is changed."""

    sets: dict[tuple[str, str, str], set[Place]]
    """Owned paths by manager, operation and subresource."""

    @classmethod
    def of(cls, given: Object) -> Ownership:
        entries: list[Object] = given.get("metadata", {}).get("managedFields", [])
        return cls(
            {
                (item["manager"], item["operation"], item.get("subresource", "")): set(_read_fields(item["fieldsV1"]))
                for item in entries
            }
        )

    def written(self, api_version: str, before: Object) -> list[Object]:
        """The managedFields entries; an unchanged entry keeps its time."""
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
        """Makes this manager the only owner of the paths."""
        for other, theirs in self.sets.items():
            if other != who:
                theirs -= places

    def others(self, who: tuple[str, str, str]) -> set[Place]:
        return {place for other, places in self.sets.items() if other != who for place in places}


def now() -> str:
    """The current time in Kubernetes' format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fixed(path: str, live: Object, state: Object) -> Any:
    """What may not change of a field of a state; as Kubernetes has it, the place of the pods of a Job may while that is
    suspended and has not started.
    """
    part = at_place(state, tuple(path.split(".")))
    if path != "spec.template" or not live["spec"].get("suspend") or live.get("status", {}).get("startTime"):
        return part
    mutable_fields = {"metadata": {"labels", "annotations"}, "spec": {"nodeSelector", "tolerations"}}
    return {
        name: {field: entry for field, entry in content.items() if field not in mutable_fields.get(name, ())}
        for name, content in part.items()
    }


def selector(text: str) -> Callable[[Object], bool]:
    """A label selector: equality and existence, as `a=b,c!=d,e,!f`.

    Raises:
        Refused: The selector is of another form.
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
        return all(str(at_place(given, tuple(name.split(".")))) == value.removeprefix("=") for name, _, value in terms)

    return fits


def merged_by_keys(schema: Mapping[str, Any] | None, place: Place) -> bool:
    """Whether the list at a path is merged item by item."""
    here = schema
    for name in place:
        here = None if here is None else here.get("properties", {}).get(name)
    return here is not None and here.get("x-kubernetes-list-type") == "map"


def fitted(given: Any, schema: Mapping[str, Any]) -> Any:
    """A value as stored under a structural schema: unknown fields dropped, defaults filled in."""
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
