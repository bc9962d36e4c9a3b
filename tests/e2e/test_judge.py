"""A job with a judge model on a real cluster: a key by reference, an endpoint by a policy, failures by conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import obstore
import pyarrow
import pytest
from pyarrow import parquet

from . import judge_model
from .cluster.client import Cluster, Object
from .installation import Installation, condition, is_true, small, stored, summary
from .test_isolation import reached

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, SECRET, ENTRY = "judged", "judge-key", "OPENAI_API_KEY"
RIGHT, WRONG = "key-that-is-right", "key-that-is-wrong"
ENVIRONMENT = "import os; print(*os.environ.values())"


@pytest.fixture
def judge_url(cluster: Cluster) -> Iterator[str]:
    """The base URL of a judge model that accepts `RIGHT`, in a namespace of its own."""
    with cluster.namespace("models") as namespace:
        cluster.apply(judge_model.manifests(cluster, RIGHT), namespace)
        cluster.wait_ready(judge_model.NAME, namespace)
        yield judge_model.url(namespace)


def secret(key: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {ENTRY: key}}


def pods(cluster: Cluster, namespace: str) -> dict[str, Object]:
    """Running pods of the job by role."""
    listed = cluster.list("pods", namespace, f"kestrl.dev/job={NAME}")
    return {
        item["metadata"]["labels"]["kestrl.dev/role"]: item for item in listed if item["status"]["phase"] == "Running"
    }


def holders(cluster: Cluster, namespace: str, key: str) -> tuple[set[str], set[str]]:
    """Roles whose pods refer to the secret, and roles with a container whose environment has the key."""
    running = pods(cluster, namespace)
    referring = {role for role, item in running.items() if SECRET in json.dumps(item["spec"])}
    having = {
        role
        for role in running.keys() & {"judge", "rollout", "tools", "inference"}
        if key
        in cluster.exec(
            running[role]["metadata"]["name"], "python", "-c", ENVIRONMENT, namespace=namespace, container=role
        )
    }
    return referring, having


def trained_rewards(installation: Installation, job: Object) -> list[float]:
    """Rewards of all episodes that the job kept of its training, those without one left out."""
    run = f"e2e/{job['metadata']['name']}-{job['metadata']['uid'].partition('-')[0]}/episodes/train"
    tables = [
        parquet.read_table(pyarrow.BufferReader(bytes(obstore.get(installation.bucket, path).bytes())))
        for path in stored(installation, job["metadata"]["name"])
        if path.startswith(run)
    ]
    rows = [row for table in tables for row in table.select(["outcome", "reward"]).to_pylist()]
    return [row["reward"] for row in rows if row["outcome"] == "trained" and row["reward"] is not None]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_wrong_key_scores_nothing_and_a_corrected_one_goes_on(
    installation: Installation, network_policies: Cluster, judge_url: str
) -> None:
    cluster = network_policies
    server = judge_url.removeprefix("http://").removesuffix("/v1")
    ruler = {"baseUrl": judge_url, "model": "judge", "secretRef": {"name": SECRET}}
    with installation.place() as namespace:
        cluster.apply(secret(WRONG), namespace)
        rewards = [{"rule": "kestrl_email.rewards:art_e", "weight": 0}, {"ruler": ruler}]
        policy = {"backoffLimit": 20}
        cluster.apply(small(NAME, rewards=rewards, failurePolicy=policy, schedule__maxSteps=2), namespace)

        installation.wait(NAME, namespace, lambda job: condition(job, "RewardHealthy")[0] == "False", 300)
        job = installation.job(NAME, namespace)
        status, reason, message = condition(job, "RewardHealthy")
        assert (status, reason) == ("False", "JudgeFailing")
        assert "judge/unscored" in message
        stopped = installation.wait(
            NAME, namespace, lambda job: "judge/no_group_scored" in json.dumps(job["status"]), 300
        )
        assert "Incorrect API key provided" in json.dumps(stopped["status"])
        assert stopped["status"]["progress"].get("step", 0) == 0
        assert trained_rewards(installation, stopped) == []

        assert holders(cluster, namespace, WRONG) == ({"judge"}, {"judge"})
        store = f"{installation.store.host}:{installation.store.ports['proxy']}"
        assert reached(cluster, namespace, "judge", server, store, "kubernetes.default.svc:443") == [True, False, False]
        assert reached(cluster, namespace, "tools", server) == [False]

        cluster.apply(secret(RIGHT), namespace)
        judge = pods(cluster, namespace)["judge"]["metadata"]["name"]
        cluster.delete("pod", judge, namespace)  # a container has the secret's content of when it started
        done = installation.wait(NAME, namespace, is_true("Succeeded"), 600)
        rewards_given = trained_rewards(installation, done)
        assert len(rewards_given) >= 2 * 4 * 4
        assert min(rewards_given) >= judge_model.LEAST, "what the judge did not score was trained on"
        assert set(summary(installation, done)["failures"]) == {"judge/unscored"}
