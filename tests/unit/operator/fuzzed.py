"""Passes of the operator over random jobs, in a process of its own whose memory is measured.

Run as a program with the numbers of valid and of mutated jobs, and a seed; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import Kind
from kestrl_operator.controllers.job_state import JobStates
from kestrl_operator.controllers.reconcile import Reconciler
from kestrl_operator.events import Events
from kestrl_operator.operator import Operator  # everything that the operator loads
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.store import Store
from kestrl_operator.work.work_record import WorkRecord

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import job_of, mutated, valid

QUICKSTART = Path(__file__).parents[3] / "examples" / "email-search" / "quickstart.yaml"
IMAGES = {
    "engine": {"cpu": "r/e:1"},
    "learner": {"cpu": "r/l:1"},
    "agent": "r/a:1",
    "rollout": "r/r:1",
    "tools": "r/t:1",
    "judge": "r/j:1",
}
Object = dict[str, Any]


class Taking(Api):
    """An API server that accepts everything, in memory."""

    def __init__(self) -> None:
        self.version, self.requests = 1, 0
        self.jobs: dict[str, Object] = {}

    def _made(self, given: Mapping[str, Any]) -> Object:
        self.version += 1
        self.requests += 1
        metadata = given["metadata"]
        uid = metadata.get("uid", f"{given['kind']}/{metadata['name']}")
        return {**given, "metadata": {**metadata, "uid": uid, "resourceVersion": str(self.version)}}

    async def apply(self, body: Mapping[str, Any], *, force: bool = True, dry_run: bool = False) -> Object:
        return self._made(body)

    async def apply_status(self, namespace: str, name: str, version: int, status: Mapping[str, Any]) -> Object:
        return self._made({**self.jobs[name], "status": status})

    async def create(self, kind: Kind, body: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        return self._made(body)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        for nothing in ():
            yield nothing


async def passes(given: int, wrong: int, seed: int) -> Object:
    """Reconciles valid jobs, which all stay, and mutated jobs, which exist one at a time."""
    rng, api, store = random.Random(seed), Taking(), Store()
    base = yaml.safe_load(QUICKSTART.read_text())["spec"]
    cluster = read_cluster({"images": IMAGES, "storage": {"uri": "s3://bucket/runs"}})
    states = JobStates(lambda _: None)
    reconciler = Reconciler(api, store, states, Events(api, "fuzzed"), cluster, b"k" * 32, WorkRecord(None))
    seen = Counter[str]()

    async def handle(name: str, spec: object) -> None:
        job = api.jobs[name] = job_of(spec, name)
        key = store.job(job)
        for _ in range(2):
            await reconciler.reconcile(key)
        conditions = {item["type"]: item for item in store.jobs[key]["status"]["conditions"]}
        accepted = conditions["Accepted"]
        seen[f"{accepted['status']}/{accepted['reason']}"] += 1
        assert accepted["status"] == "True" or accepted["message"], spec

    for number in range(given):
        await handle(f"valid-{number}", valid(rng, base))
    for number in range(wrong):
        name = f"wrong-{number}"
        await handle(name, mutated(rng, base))
        job = api.jobs.pop(name)
        key = store.job({**job, "metadata": {**job["metadata"], "resourceVersion": str(api.version + 1)}}, deleted=True)
        states.drop(key)
    return {
        "seen": dict(seen),
        "mib": largest_mib(),
        "requests": api.requests,
    }


def largest_mib() -> float:
    """The largest resident set of this program. getrusage would return its parent's, if that was larger."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


if __name__ == "__main__":
    assert Operator is not None
    sys.stdout.write(json.dumps(asyncio.run(passes(*map(int, sys.argv[1:4])))))
