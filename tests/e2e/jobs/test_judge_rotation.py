"""The keys of a judge model and of a telemetry collector rotated while a job trains: it waits for the judge's until the
Secret has the new one, sends spans with the collector's new one, and loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.e2e import judge_model
from tests.e2e.cluster.client import Cluster, Object
from tests.e2e.cluster.commands import eventually
from tests.e2e.cluster.host_server import HostServer, Response
from tests.e2e.installation import COLLECTOR_PORT, Installation, condition, is_true, small, summary
from tests.fakes.judge_model import Asked, Refusal, Said, ScriptedJudge, graded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, SECRET, ENTRY = "rotated-judge", "judge-key", "OPENAI_API_KEY"
COLLECTOR, HEADERS = "collector", "headers"
"""The Secret with the headers for the collector, and its entry."""
STEPS = 6
"""The keys change after the first: some are left on any machine."""


@dataclass
class JudgeModel:
    """A judge model beside the cluster."""

    url: str
    key: str = "the-first-key"
    """The key that it accepts."""

    def answer(self, asked: Asked) -> Said | Refusal:
        if asked.headers.get("Authorization") != f"Bearer {self.key}":
            return Refusal(status=401, message="Incorrect API key provided")
        return graded(asked, judge_model.grade)


@pytest.fixture
def model(pod_routes: Cluster) -> Iterator[JudgeModel]:
    """The judge model, which serves in a thread of its own."""
    host = pod_routes.host_address
    judge = JudgeModel(f"http://{host}:{judge_model.PORT}/v1")
    loop, serves, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with ScriptedJudge(judge.answer, host=host, port=judge_model.PORT):
            serves.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert serves.wait(30)
        yield judge
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@pytest.fixture
def collector(pod_routes: Cluster) -> Iterator[HostServer]:
    """A telemetry collector, which takes exports by OTLP over HTTP."""
    received = Response(content_type="application/x-protobuf")
    with HostServer(pod_routes, lambda _: received, port=COLLECTOR_PORT, key="the-first-key") as serving:
        yield serving


def secret(name: str, entry: str, text: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {entry: text}}


def headers(key: str) -> Object:
    return secret(COLLECTOR, HEADERS, f"Authorization=Bearer%20{key}")


def with_headers() -> Object:
    """A patch that mounts the headers for the collector, which the learner reads for each export."""
    folder = "/collector"
    container = {
        "name": "learner",
        "env": [{"name": "KESTRL_OTLP_HEADERS_FILE", "value": f"{folder}/{HEADERS}"}],
        "volumeMounts": [{"name": COLLECTOR, "mountPath": folder}],
    }
    volume = {"name": COLLECTOR, "secret": {"secretName": COLLECTOR}}
    return {"role": "learner", "template": {"spec": {"volumes": [volume], "containers": [container]}}}


@pytest.mark.share(4)
@pytest.mark.timeout(2400)
def test_rotated_keys_of_a_judge_and_a_collector_cost_a_running_job_nothing_but_time(
    installation: Installation, model: JudgeModel, collector: HostServer
) -> None:
    cluster = installation.cluster
    ruler = {"baseUrl": model.url, "model": "judge", "secretRef": {"name": SECRET}}
    job = small(
        NAME,
        rewards=[{"rule": "kestrl_email.rewards:art_e", "weight": 0}, {"ruler": ruler}],
        telemetry__otlp=f"http://{cluster.host_address}:{COLLECTOR_PORT}",
        patches=[with_headers()],
        algorithm__groupsPerStep=2,
        schedule__maxSteps=STEPS,
    )
    with installation.place() as namespace:
        cluster.apply([secret(SECRET, ENTRY, model.key), headers(collector.key)], namespace)
        cluster.apply(job, namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 800)
        eventually("the collector is sent spans", lambda: collector.accepted > 0, 300)
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}

        model.key, collector.key = "the-second-key", "another-key"
        collector.accepted = 0
        waits = installation.wait(
            NAME, namespace, lambda refused: condition(refused, "LearnerProgressing")[1] == "CredentialRefused", 400
        )
        assert "put the new one into the Secret" in condition(waits, "LearnerProgressing")[2]
        assert waits["status"]["shown"]["phase"] == "WaitingFor"
        assert collector.accepted == 0
        cluster.apply([secret(SECRET, ENTRY, model.key), headers(collector.key)], namespace)
        eventually("the collector is sent spans with the new key", lambda: collector.accepted > 0, 300)
        done = installation.wait(NAME, namespace, is_true("Succeeded"), 800)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", STEPS)
        assert report["failures"].keys() == {"judge/judge_unauthorized"}, "no group was left unscored"
        assert done["status"].get("restarts", 0) == 0
        assert {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)} <= pods, "no pod was replaced"
