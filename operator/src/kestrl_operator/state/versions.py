"""The newest known state of each watched object, deletions included."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]
REMEMBERED = 10_000
"""Remembered deletions: the answer to a list or a write that preceded a deletion may be read after it."""


class Versions:
    """The newest known resourceVersion of each object by uid, and those of the latest deletions."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._deleted: OrderedDict[str, int] = OrderedDict()

    def of(self, uid: str) -> int:
        """The known resourceVersion of an object; 0 for none."""
        return self._versions.get(uid, 0)

    def take(self, body: Object) -> bool:
        """Records an object's state; returns False for one that is older than the known state or than its deletion."""
        uid, version = uid_of(body), int(body["metadata"]["resourceVersion"])
        if version < self._versions.get(uid, 0) or version <= self._deleted.get(uid, -1):
            return False
        self._versions[uid] = version
        return True

    def delete(self, body: Object) -> None:
        """Records a deletion, by the object as it was last."""
        uid = uid_of(body)
        self.forget(uid)
        self._deleted[uid] = int(body["metadata"]["resourceVersion"])
        while len(self._deleted) > REMEMBERED:
            self._deleted.popitem(last=False)

    def forget(self, uid: str) -> None:
        """Removes an object that a list did not contain."""
        self._versions.pop(uid, None)


def uid_of(body: Object) -> str:
    return str(body["metadata"]["uid"])
