"""The key of an HTTP tool rotated while a job trains: it waits until the Secret has the new one, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from tests.e2e.cluster.client import Cluster, Object
from tests.e2e.cluster.host_server import HostServer, Response
from tests.e2e.installation import BUCKET, Installation, condition, is_true, small, summary

from kestrl_email.world import SYSTEM_PROMPT

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


def secret(key: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {ENTRY: key}}


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


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_rotated_key_of_a_tool_costs_a_running_job_nothing_but_time(
    installation: Installation, server: HostServer
) -> None:
    cluster = installation.cluster
    rows = [
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
    with installation.place() as namespace:
        cluster.apply(secret(server.key), namespace)
        job = small(
            NAME,
            data__train={"uri": f"s3://{BUCKET}/mail-rows.jsonl"},
            tools=[tool(cluster.host_address)],
            rewards=[{"rule": "kestrl_email.rewards:art_e"}],
            rollout__deadlines__tool="40s",
            schedule__maxSteps=STEPS,
        )
        cluster.apply(job, namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 420)
        assert server.accepted, "the model calls the tool"
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}
        server.key = "the second"
        waits = installation.wait(
            NAME, namespace, lambda refused: condition(refused, "LearnerProgressing")[1] == "CredentialRefused", 300
        )
        assert "put the new one into the Secret" in condition(waits, "LearnerProgressing")[2]
        assert waits["status"]["shown"]["phase"] == "WaitingFor"
        cluster.apply(secret(server.key), namespace)
        done = installation.wait(NAME, namespace, is_true("Succeeded"), 420)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", STEPS)
        assert report["failures"].keys() == {"tool/tool_unauthorized"}
        assert done["status"].get("restarts", 0) == 0
        assert {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)} <= pods, "no pod was replaced"
