"""Names that a job takes for its objects: what is there under such a name and is not the job's is left alone.

Server-side apply merges into whatever has the name, and by the owner reference that is deleted with the job. Of the
kinds that are not watched the operator creates an empty object. Where there is one already, it asks the API server
whether that is the job's, by a JSON patch that changes nothing and fails where it is not: it may not read Secrets.
"""

from __future__ import annotations

from typing import Any

from kestrl_operator.apiserver.client import Api, ApiProblem, Conflict, Gone
from kestrl_operator.apiserver.kinds import Kind, kind_of

Object = dict[str, Any]
CLAIMED = frozenset({"ConfigMap", "ServiceAccount", "Secret"})
"""Kinds that are not watched, since RBAC cannot restrict a watch to the operator's own objects."""
REFUSED = frozenset({400, 403, 413, 422})
"""Status codes with which the API server rejects an object that a user has to fix."""
OWNER = "/metadata/ownerReferences/0/uid"
PREFIX, UNSTABLE = "app.kubernetes.io/", "app.kubernetes.io/version"


class Foreign(ApiProblem):
    """An object of this name is there and belongs to somebody else."""

    def __init__(self, item: Object) -> None:
        metadata = item["metadata"]
        super().__init__(
            f"{item['kind']} {metadata['namespace']}/{metadata['name']} is there and is not this job's; it is left "
            "alone. Delete or rename it, or give the job another metadata.name",
            status=409,
            retryable=False,
        )


async def claim(api: Api, item: Object, *, has_begun: bool, dry_run: bool = False) -> Object:
    """The object to apply, with the uid of what has its name; that is the job's own, or was created empty.

    Args:
        api: The API server.
        item: An object of a claimed kind.
        has_begun: Whether the job has begun, so that the object probably exists.
        dry_run: Whether nothing is created.

    Raises:
        Foreign: It belongs to somebody else.
        ApiProblem: The API server refuses it, or does not answer.
    """
    kind = kind_of(item)
    if has_begun:
        try:
            return await _owned(api, kind, item)
        except Gone:
            pass  # it was deleted, and is created again
    metadata = item["metadata"]
    metadata_fields = ("name", "namespace", "labels", "ownerReferences")
    empty = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {name: metadata[name] for name in metadata_fields if name in metadata},
    }
    try:
        created_object = await api.create(kind, empty, dry_run=dry_run)
    except Conflict:
        return await _owned(api, kind, item)
    return item if dry_run else _pinned(item, created_object)


async def _owned(api: Api, kind: Kind, item: Object) -> Object:
    """The object with the uid of the one that is there, if that is the job's, or an orphan of a job of its name."""
    metadata = item["metadata"]
    labels = metadata.get("labels", {})
    owner = {OWNER: metadata["ownerReferences"][0]["uid"]}
    orphan = {
        f"/metadata/labels/{name.replace('/', '~1')}": value
        for name, value in labels.items()
        if name.startswith(PREFIX) and name != UNSTABLE
    }
    for facts in (owner, orphan):
        existing = await api.passes(kind, metadata["namespace"], metadata["name"], facts)
        if facts and existing is not None:
            return _pinned(item, existing)
    raise Foreign(item)


def _pinned(item: Object, existing: Object) -> Object:
    """The object, for application to this very one and to none that takes its name meanwhile."""
    return {**item, "metadata": {**item["metadata"], "uid": existing["metadata"]["uid"]}}
