"""A task set of verifiers on a real cluster, in pods of the manifest's image."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import obstore
import pytest
from pyarrow import BufferReader, parquet
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import run
from tests.e2e.installation import BUCKET, ROOT, Installation, is_true, small, stored, summary

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME = "words"
ENVIRONMENTS = ROOT / ".tools" / "agents"
"""Environments of clients, in the checkout, which pods have mounted."""


@pytest.fixture(scope="module")
def programs() -> Path:
    """The programs of an environment with verifiers, which is made unless it is there."""
    run(sys.executable, ROOT / "scripts" / "client_environments.py", ENVIRONMENTS, "verifiers", seconds=300)
    return ENVIRONMENTS / "verifiers" / "bin"


def row(number: int) -> dict[str, object]:
    """A row as `kestrl data verifiers` writes it."""
    task = {"prompt": "Say lamp.", "answer": "lamp"}
    digest = hashlib.sha256(json.dumps(task, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
    return {"id": f"word-tasks-{number}", "task": task, "digest": digest}


@pytest.mark.share(4)
@pytest.mark.timeout(1500)
def test_a_task_set_plays_in_pods_of_its_image(
    installation: Installation, network_policies: Cluster, programs: Path
) -> None:
    """Its pods reach the workers' episodes alone, and each reward is the task set's."""
    cluster = network_policies
    rows = "".join(f"{json.dumps(row(number))}\n" for number in range(8))
    obstore.put(installation.bucket, "words.jsonl", rows.encode())
    container = {
        "name": "agent",
        "env": [{"name": "PATH", "value": f"{programs}:/usr/bin:/bin"}],
        "workingDir": str(ROOT / "tests" / "data"),
    }
    job = small(
        NAME,
        data__train={"uri": f"s3://{BUCKET}/words.jsonl"},
        environment={"verifiers": {"taskset": "word-tasks"}, "image": cluster.image, "replicas": 2, "sessions": 8},
        agent={"maxTokens": 12},
        tools=None,
        rewards=None,
        algorithm__groupsPerStep=2,
        rollout__concurrency=8,
        schedule__maxSteps=1,
        patches=[{"role": "agent", "template": {"spec": {"containers": [container]}}}],
    )
    with installation.place() as namespace:
        cluster.apply(job, namespace)
        cluster.wait_for(
            "deployment",
            f"{NAME}-agent",
            lambda found: found["status"].get("readyReplicas", 0) == 2,
            namespace,
            seconds=500,
        )
        ended = installation.wait(NAME, namespace, is_true("Succeeded"), 800)
        report = summary(installation, ended)
        assert (report["status"], report["steps"], report["failures"]) == ("succeeded", 1, {})
        (path,) = [path for path in stored(installation, NAME) if "/episodes/train/" in path]
        content = bytes(obstore.get(installation.bucket, path).bytes())
        episodes = parquet.read_table(BufferReader(content), columns=["outcome", "reward", "rewards"]).to_pylist()
        assert [episode["outcome"] for episode in episodes] == ["trained"] * 8
        assert all(0 <= episode["reward"] <= 1.25 for episode in episodes)
