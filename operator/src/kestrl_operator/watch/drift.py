"""Drift detection: changes of applied objects by other field managers. Kubernetes' own controllers write status and
annotations of applied objects, never the spec.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kestrl_operator.apiserver.client import SCALER
from kestrl_operator.state.snapshot import MANAGER

REMEMBERED = 10_000


class Drift:
    """The changes seen last, by object. A change that persists is reported once."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, str] = OrderedDict()

    def is_new(self, body: Mapping[str, Any]) -> bool:
        """Whether another manager changed the object's spec since the last look at it."""
        uid, mark = body["metadata"]["uid"], changed_by_another(body)
        if not mark or self._seen.get(uid) == mark:
            return False
        self._seen[uid] = mark
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True


def changed_by_another(body: Mapping[str, Any]) -> str:
    """A digest of the changes to an object's spec by other managers; empty when there are none. Pure.

    A change through the scale subresource has no time, so the generation is part of the digest.
    """
    metadata = body["metadata"]
    foreign = sorted(
        f"{entry.get('manager')}/{entry.get('subresource', '')}/{entry.get('time', '')}"
        for entry in metadata.get("managedFields", ())
        if entry.get("manager") not in {MANAGER, SCALER}
        and entry.get("subresource") != "status"
        and "f:spec" in entry.get("fieldsV1", {})
    )
    return f"{metadata.get('generation', '')} {' '.join(foreign)}" if foreign else ""
