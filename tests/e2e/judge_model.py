"""A judge model behind a Service of the cluster: the scripted one, which asks for a key and never scores 0.

`python -m tests.e2e.judge_model PORT` serves it in a pod.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.fakes.judge_model import Asked, Refusal, Said, ScriptedJudge, graded, last_answer

from .cluster.client import Cluster, Object

NAME = "judge-model"
PORT = 8080
"""Port of the Service and of its pod: a policy sees the pod's."""
KEY = "JUDGE_MODEL_KEY"
"""Variable with the key that the server accepts."""
LEAST = 0.1
"""Smallest score that it gives: a reward of 0 is not its own."""


def url(namespace: str) -> str:
    """The base URL as a manifest names it."""
    return f"http://{NAME}.{namespace}.svc:{PORT}/v1"


def manifests(cluster: Cluster, key: str) -> list[Object]:
    """The pod and its Service, for a namespace whose pods have the checkout mounted."""
    container = {
        "name": NAME,
        "image": cluster.image,
        "imagePullPolicy": "Never",
        "command": ["python", "-m", __name__, str(PORT)],
        "workingDir": str(cluster.node.layout.checkout),
        "env": [{"name": KEY, "value": key}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    made = {"name": NAME, "labels": {"app": NAME}}
    ports = [{"port": PORT}]
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": made, "spec": {"selector": {"app": NAME}, "ports": ports}},
    ]


def grade(trajectory: Mapping[str, Any]) -> float:
    """A score that differs between most answers: it grows with their length."""
    return LEAST + (1 - LEAST) * min(len(last_answer(trajectory)), 100) / 100


async def serve(port: int, key: str) -> None:
    """Serves until the process is ended."""

    def answer(asked: Asked) -> Said | Refusal:
        if asked.headers.get("Authorization") != f"Bearer {key}":
            return Refusal(status=401, message="Incorrect API key provided")
        return graded(asked, grade)

    async with ScriptedJudge(answer, host="0.0.0.0", port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), os.environ[KEY]))
