"""The key of an HTTP tool and the token of claimed sandboxes, rotated while a job trains: where it must, it waits until
the Secret has the new one, and it loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from tests.e2e.cluster.client import Cluster, Object, has_condition
from tests.e2e.cluster.commands import CommandFailed, eventually
from tests.e2e.cluster.host_server import HostServer, Response
from tests.e2e.installation import BUCKET, Installation, condition, is_true, newest_adapter, small, summary

from kestrl_email.world import SYSTEM_PROMPT

from .agent_sandbox import POOL, has_ready, running_agent_sandbox, runtime_class, warm_pool
from .sandboxed_search import SandboxedSearch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, SECRET, ENTRY = "rotated-tool", "mail-server", "KEY"
PORT = 8080
"""One of the ports that jobs may reach."""
STEPS = 6
"""The key changes after the first: some are left on any machine."""


@pytest.fixture
def server(pod_routes: Cluster) -> Iterator[HostServer]:
    """A mail server whose searches find none."""
    with HostServer(pod_routes, lambda _: Response(body=b"[]"), port=PORT, key="the first") as serving:
        yield serving


def secret(name: str, entry: str, key: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {entry: key}}


def tool(host: str) -> dict[str, Any]:
    """The search of the e-mail example as an endpoint of the server."""
    keywords = {"type": "array", "items": {"type": "string"}}
    endpoint = {
        "name": "search_emails",
        "description": "Search mails.",
        "path": "/search",
        "parameters": {"keywords": keywords},
        "required": ["keywords"],
    }
    authorization = {"secretRef": {"name": SECRET}, "secretKey": ENTRY, "prefix": "Bearer "}
    return {
        "http": {
            "baseUrl": f"http://{host}:{PORT}",
            "endpoints": [endpoint],
            "secretHeaders": {"Authorization": authorization},
            "timeout": "30s",  # a call of a busy machine is no failure
        }
    }


def put_rows(installation: Installation) -> None:
    """Writes questions whose search has no inbox of its own."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "mail",
            "agent_name": "tool_agent",
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": f"When is the meeting on topic {number}?"},
            ],
            "reward_model": {"style": "rule", "ground_truth": {"answer": "Monday", "message_id": "m", "named": []}},
        }
        for number in range(400)
    ]
    obstore.put(installation.bucket, "mail-rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def searching_job(name: str, search: dict[str, Any], **changes: Any) -> Object:
    """A job whose model calls this search."""
    return small(
        name,
        data__train={"uri": f"s3://{BUCKET}/mail-rows.jsonl"},
        tools=[search],
        rewards=[{"rule": "kestrl_email.rewards:art_e"}],
        rollout__deadlines__tool="40s",
        **changes,
    )


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_rotated_key_of_a_tool_costs_a_running_job_nothing_but_time(
    installation: Installation, server: HostServer
) -> None:
    cluster = installation.cluster
    put_rows(installation)
    with installation.place() as namespace:
        cluster.apply(secret(SECRET, ENTRY, server.key), namespace)
        cluster.apply(searching_job(NAME, tool(cluster.host_address), schedule__maxSteps=STEPS), namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 420)
        assert server.accepted, "the model calls the tool"
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}
        server.key = "the second"
        waits = installation.wait(
            NAME, namespace, lambda refused: condition(refused, "LearnerProgressing")[1] == "CredentialRefused", 300
        )
        assert "put the new one into the Secret" in condition(waits, "LearnerProgressing")[2]
        assert waits["status"]["shown"]["phase"] == "WaitingFor"
        cluster.apply(secret(SECRET, ENTRY, server.key), namespace)
        done = installation.wait(NAME, namespace, is_true("Succeeded"), 420)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", STEPS)
        assert report["failures"].keys() == {"tool/tool_unauthorized"}
        assert done["status"].get("restarts", 0) == 0
        assert {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)} <= pods, "no pod was replaced"


CLAIMING, TOKENS, TOKEN = "claiming", "code-sandbox", "KESTRL_SANDBOX_TOKEN"
"""A job, the Secret of its warm pool in the example, and the entry."""
CLAIMS = "sandboxclaims.extensions.agents.x-k8s.io"
SANDBOXES, CLAIMING_STEPS = 4, 40
"""Pods of the pool; and steps, of which some are left when all pods have the second token."""
ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request("http://127.0.0.1:8080/", headers={"Authorization": f"Bearer {sys.argv[1]}"})
try:
    print(urllib.request.urlopen(request).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def pool(cluster: Cluster) -> list[Object]:
    """The example's warm pool on the cluster's own images, in pods that may make user namespaces."""
    documents = warm_pool(SANDBOXES)
    (template,) = (item for item in documents if item["kind"] == "SandboxTemplate")
    spec = template["spec"]["podTemplate"]["spec"]
    spec["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    (container,) = spec["containers"]
    container |= {"image": cluster.image, "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": "10m", "memory": "128Mi"}}
    return [runtime_class("runc"), *documents]


def claiming_job(cluster: Cluster) -> Object:
    search = {
        "name": "search_emails",
        "use": f"{SandboxedSearch.__module__}:{SandboxedSearch.__name__}",
        "config": {"session": True, "max_sandboxes": SANDBOXES},
        "sandbox": {"claim": {"warmPool": POOL, "secretRef": {"name": TOKENS}}},
    }
    container = {"name": "tools", "env": [{"name": "PYTHONPATH", "value": str(cluster.node.layout.checkout)}]}
    importing = {"role": "tools", "template": {"spec": {"containers": [container]}}}
    changes = {"algorithm__groupsPerStep": 1, "schedule__maxSteps": CLAIMING_STEPS, "patches": [importing]}
    return searching_job(CLAIMING, search, **changes)


def await_claim(cluster: Cluster, namespace: str) -> None:
    """Waits until an episode has a sandbox; its claim is deleted with it."""

    def is_bound(claim: Object) -> bool:
        return bool(claim.get("status", {}).get("sandbox", {}).get("name"))

    eventually("a call of the model has a sandbox", lambda: any(map(is_bound, cluster.list(CLAIMS, namespace))), 120)


def refused_by_all(cluster: Cluster, namespace: str, token: str) -> bool:
    """Whether each server of the pool refuses a token."""
    pods = cluster.list("pods", namespace, f"kestrl.dev/sandbox={POOL}")
    names = [item["metadata"]["name"] for item in pods if has_condition(item, "Ready")]
    return bool(names) and all(answer_to(cluster, namespace, name, token) == "401" for name in names)


def answer_to(cluster: Cluster, namespace: str, pod: str, token: str) -> str:
    """The status with which a server answers a token; empty where its pod has ended meanwhile."""
    try:
        return cluster.exec(pod, "python", "-c", ASK, token, namespace=namespace).strip()
    except CommandFailed:
        return ""


@pytest.mark.share(12)
@pytest.mark.timeout(2400)
def test_a_rotated_token_of_claimed_sandboxes_costs_a_running_job_no_episode(
    installation: Installation, tmp_path: Path
) -> None:
    cluster = installation.cluster
    put_rows(installation)
    with running_agent_sandbox(cluster, tmp_path), installation.place() as namespace:
        cluster.apply([secret(TOKENS, TOKEN, "the-first-token"), *pool(cluster)], namespace)
        cluster.wait_for("sandboxwarmpool", POOL, has_ready(SANDBOXES), namespace, seconds=240)
        cluster.apply(claiming_job(cluster), namespace)
        installation.wait_for_adapter(CLAIMING, namespace, 1, 600)
        await_claim(cluster, namespace)
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace, f"kestrl.dev/job={CLAIMING}")}

        cluster.apply(secret(TOKENS, TOKEN, "the-second-token"), namespace)
        eventually("no server takes the first", lambda: refused_by_all(cluster, namespace, "the-first-token"), 240)
        step = newest_adapter(installation, CLAIMING)
        assert step < CLAIMING_STEPS - 1, "it trains on"
        await_claim(cluster, namespace)
        done = installation.wait(CLAIMING, namespace, is_true("Succeeded"), 1200)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", CLAIMING_STEPS)
        assert report["failures"].keys() <= {"sandbox/sandbox_unauthorized"}, "no scenario was given up"
        assert done["status"].get("restarts", 0) == 0
        present = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace, f"kestrl.dev/job={CLAIMING}")}
        assert present <= pods, "no pod was replaced"
