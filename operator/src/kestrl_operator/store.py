"""What the watch streams told, kept small: jobs as they are, pods and workloads as far as they are looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from kestrl.plan.components import Role
from kestrl_operator.observe import Pod, Workload, pod_of, workload_of

Object = Mapping[str, Any]
JOB_LABEL = "kestrl.dev/job"
INSTANCE_LABEL = "app.kubernetes.io/instance"


class Key(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Store:
    """The newest that is known of each object. An event that is older than what is known already changes nothing."""

    def __init__(self) -> None:
        self.jobs: dict[Key, Object] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._workloads: dict[Key, dict[Role, Workload]] = {}
        self._versions: dict[str, int] = {}

    def pods(self, key: Key) -> list[Pod]:
        return list(self._pods.get(key, {}).values())

    def workloads(self, key: Key) -> dict[Role, Workload]:
        return dict(self._workloads.get(key, {}))

    def version(self, uid: str) -> int:
        """The resourceVersion that is known of an object; 0 for none."""
        return self._versions.get(uid, 0)

    def _newer(self, given: Object) -> bool:
        uid, version = given["metadata"]["uid"], int(given["metadata"]["resourceVersion"])
        if version < self._versions.get(uid, 0):
            return False
        self._versions[uid] = version
        return True

    def job(self, given: Object, *, deleted: bool = False) -> Key:
        """Takes in a job; returns its key."""
        metadata = given["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        if deleted:
            known = self.jobs.get(key)
            if known is not None and known["metadata"]["uid"] == metadata["uid"]:
                del self.jobs[key]
            self._versions.pop(metadata["uid"], None)
        elif self._newer(given):
            lean = {name: value for name, value in metadata.items() if name != "managedFields"}
            self.jobs[key] = {**given, "metadata": lean}
        return key

    def pod(self, given: Object, *, deleted: bool = False) -> Key | None:
        """Takes in a pod; returns the key of its job."""
        metadata = given["metadata"]
        job = metadata.get("labels", {}).get(JOB_LABEL)
        pod = pod_of(given)
        if job is None or pod is None:
            return None
        key = Key(metadata["namespace"], job)
        pods = self._pods.setdefault(key, {})
        if deleted:
            self._versions.pop(pod.uid, None)
            if pod.name in pods and pods[pod.name].uid == pod.uid:
                del pods[pod.name]
            if not pods:
                del self._pods[key]
        elif self._newer(given):
            pods[pod.name] = pod
        return key

    def workload(self, given: Object, *, deleted: bool = False) -> Key | None:
        """Takes in a StatefulSet or Deployment; returns the key of its job."""
        metadata = given["metadata"]
        job = metadata.get("labels", {}).get(INSTANCE_LABEL)
        workload = workload_of(given)
        if job is None or workload is None:
            return None
        key = Key(metadata["namespace"], job)
        if deleted:
            self._versions.pop(metadata["uid"], None)
            known = self._workloads.get(key, {})
            known.pop(workload.role, None)
            if not known:
                self._workloads.pop(key, None)
        elif self._newer(given):
            self._workloads.setdefault(key, {})[workload.role] = workload
        return key

    def keep_jobs(self, present: Collection[Key]) -> Iterator[Key]:
        """Forgets jobs that a list did not hold; yields their keys."""
        for key in [key for key in self.jobs if key not in present]:
            del self.jobs[key]
            yield key

    def keep_pods(self, present: Collection[str]) -> Iterator[Key]:
        """Forgets pods that a list did not hold, by uid; yields the keys of their jobs."""
        for key, pods in list(self._pods.items()):
            gone = [name for name, pod in pods.items() if pod.uid not in present]
            for name in gone:
                self._versions.pop(pods.pop(name).uid, None)
            if not pods:
                del self._pods[key]
            if gone:
                yield key
