"""The jobs of one kind as the watch streams delivered them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from kestrl_operator.state.versions import Versions, uid_of

Object = Mapping[str, Any]


class Key(NamedTuple):
    """Namespace and name of a job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class JobObjects:
    """The newest known state of the jobs of one kind, and the versions of all that belongs to them. An event older than
    that state changes nothing.
    """

    def __init__(self) -> None:
        self.jobs: dict[Key, Object] = {}
        self._versions = Versions()

    def version(self, uid: str) -> int:
        """The known resourceVersion of an object; 0 for none."""
        return self._versions.of(uid)

    def job(self, body: Object, *, deleted: bool = False) -> Key:
        """Stores a job; returns its key."""
        metadata = body["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        if deleted:
            self._versions.delete(body)
            self.drop(key, uid_of(body))
        elif self._versions.take(body):
            lean = {name: entry for name, entry in metadata.items() if name != "managedFields"}
            self.jobs[key] = {**body, "metadata": lean}
        return key

    def drop(self, key: Key, uid: str) -> None:
        """Removes a job that no longer exists."""
        stored_job = self.jobs.get(key)
        if stored_job is not None and uid_of(stored_job) == uid:
            del self.jobs[key]
        self._versions.forget(uid)

    def forget_jobs(self, uids: Collection[str]) -> Iterator[Key]:
        """Removes jobs that a list did not contain, by uid; yields their keys."""
        for key, body in list(self.jobs.items()):
            if uid_of(body) in uids:
                self.drop(key, uid_of(body))
                yield key
