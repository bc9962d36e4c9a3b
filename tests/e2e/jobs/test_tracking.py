"""A job whose run is sent to a real MLflow server and shown by the chart's page, on a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import obstore
import pytest
from pyarrow import BufferReader, parquet
from tests.e2e.cluster.client import Cluster, Object, has_condition
from tests.e2e.cluster.commands import eventually
from tests.e2e.cluster.host_server import HostServer, Request, Response
from tests.e2e.installation import JOB, RELEASE, Installation, condition, is_true, run_of, small, stored
from tests.unit.app.push.mlflow_api import Server

from kestrl._app.push.mlflow.server import serving_mlflow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, SECRET, ENTRY = "tracked", "tracking", "MLFLOW_TRACKING_TOKEN"
PORT = 8080
"""One of the ports that jobs may reach."""
STEPS = 400
"""More steps than the job does before it is suspended, on any machine."""
OWN_HEADERS = frozenset({"host", "authorization", "content-length", "accept-encoding", "connection"})
"""Headers of a request that are not forwarded."""
PAGE = f"{RELEASE}-page"
PAGE_LINK = re.compile(r"http://127\.0\.0\.1:8123(/\?token=\S+)")


@dataclass
class Tracking:
    """A real MLflow server beside the cluster, behind a proxy that asks for a token."""

    uri: str
    """Address of the MLflow server itself."""
    proxy: HostServer


@pytest.fixture
def tracking(pod_routes: Cluster, tmp_path: Path) -> Iterator[Tracking]:
    with serving_mlflow(f"sqlite:///{tmp_path}/mlflow.db") as uri:

        def forwarded_to_server(request: Request) -> Response:
            headers = {name: text for name, text in request.headers.items() if name.lower() not in OWN_HEADERS}
            url = f"{uri}{request.path}"
            answer = httpx2.request(request.method, url, content=request.body, headers=headers, timeout=60)
            return Response(answer.status_code, answer.content, answer.headers.get("Content-Type", "text/plain"))

        with HostServer(pod_routes, forwarded_to_server, port=PORT, key="the-first-token") as proxy:
            yield Tracking(uri, proxy)


def secret(token: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {ENTRY: token}}


@contextmanager
def page(installation: Installation, namespace: str, folder: Path) -> Generator[httpx2.Client]:
    """A client of the page of a namespace, which an upgrade of the chart adds, as docs/page.md says."""
    cluster, chart_values = installation.cluster, json.loads(installation.values.read_text())
    image = chart_values["jobs"]["images"]["learner"]["cpu"]
    values = folder / "values.json"
    values.write_text(json.dumps({**chart_values, "page": {"image": image, "namespaces": [{"namespace": namespace}]}}))
    target = (f"deployment/{PAGE}", f"--namespace={namespace}")
    try:
        replace(installation, values=values).install()  # it waits until the page is ready
        link = PAGE_LINK.search(cluster.kubectl("logs", *target))
        assert link is not None
        with forwarded(cluster, *target) as address, httpx2.Client(base_url=address, follow_redirects=True) as client:
            assert client.get("/").status_code == 403, "the token was not shown"
            assert client.get(link[1]).status_code == 200
            yield client
    finally:
        installation.install()


@contextmanager
def forwarded(cluster: Cluster, *target: str) -> Generator[str]:
    """The address of a port of this machine that kubectl forwards to the page's."""
    command = [cluster.kubectl_program, f"--kubeconfig={cluster.kubeconfig}", "port-forward", *target, ":8123"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = re.match(r"Forwarding from 127\.0\.0\.1:(\d+) ", line)
            assert port is not None, line
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            process.terminate()


def stored_episodes(installation: Installation, job: str) -> set[str]:
    """The ids of all episodes that a job has stored."""
    return {
        str(episode)
        for path in stored(installation, job)
        if "/episodes/" in path and path.endswith(".parquet")
        for episode in parquet.read_table(
            BufferReader(bytes(obstore.get(installation.bucket, path).bytes())), columns=["episode"]
        )
        .column("episode")
        .to_pylist()
        if episode
    }


@pytest.mark.share(12)
@pytest.mark.timeout(2400)
def test_a_run_is_in_mlflow_over_a_rotated_token_and_on_the_page(
    installation: Installation, tracking: Tracking, tmp_path: Path
) -> None:
    cluster, mlflow, proxy = installation.cluster, Server(tracking.uri), tracking.proxy
    with installation.place() as namespace:
        cluster.apply(secret(proxy.key), namespace)
        server = {
            "uri": f"http://{cluster.host_address}:{PORT}",
            "experiment": NAME,
            "secretRef": {"name": SECRET},
        }
        job = small(NAME, telemetry__mlflow=server, algorithm__groupsPerStep=2, schedule__maxSteps=STEPS)
        cluster.apply(job, namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 800)
        installation.wait(NAME, namespace, is_true("Tracked"), 400)
        cluster.wait_for("deployment", f"{NAME}-mlflow", lambda found: has_condition(found, "Available"), namespace)

        proxy.key = "the-second-token"
        refused = installation.wait(NAME, namespace, lambda found: condition(found, "Tracked")[1] == "Failing", 400)
        assert "answers 401" in condition(refused, "Tracked")[2]
        cluster.apply(secret(proxy.key), namespace)
        installation.wait(NAME, namespace, is_true("Tracked"), 400)

        with page(installation, namespace, tmp_path) as client:
            run = f"/runs/{run_of(installation.job(NAME, namespace))}"
            assert run in client.get("/").text
            assert f"{run}/train/1" in client.get(run).text
            episode = re.search(rf"{run}/train/1/episode/[0-9a-f]{{16}}", client.get(f"{run}/train/1").text)
            assert episode is not None
            assert 'id="turn-0"' in client.get(episode[0]).text

        cluster.patch(JOB, NAME, {"spec": {"suspend": True}}, namespace)
        suspended = installation.wait(NAME, namespace, is_true("Suspended"), 240)
        assert suspended["status"].get("restarts", 0) == 0
        eventually(
            "the pod that sends has ended", lambda: not cluster.list("pods", namespace, f"kestrl.dev/job={NAME}"), 120
        )
        episodes = stored_episodes(installation, NAME)
        assert len(episodes) > 2 * 4
        assert mlflow.traces(NAME).keys() == episodes, "none was lost while the token was refused"
        (known,) = mlflow.runs(NAME)
        tags = {tag["key"]: tag["value"] for tag in known["data"]["tags"]}
        assert tags["kestrl.run"] == run_of(suspended)
