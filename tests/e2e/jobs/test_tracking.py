"""A job whose run is sent to a real MLflow server and shown by the chart's page, on a real cluster."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import obstore
import pytest
from pyarrow import BufferReader, parquet
from tests.e2e.cluster.client import Cluster, Object, has_condition
from tests.e2e.cluster.commands import eventually
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


class Proxy(http.server.ThreadingHTTPServer):
    """A proxy before MLflow, reached by pods, which asks for a token."""

    token = "the-first-token"
    server_uri = ""


class Forwarding(http.server.BaseHTTPRequestHandler):
    """Forwards requests with the token."""

    server: Proxy

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, "text/plain", b"unauthorized")
            return
        headers = {name: text for name, text in self.headers.items() if name.lower() not in OWN_HEADERS}
        answer = httpx2.request(
            self.command, self.server.server_uri + self.path, content=body, headers=headers, timeout=60
        )
        self._answer(answer.status_code, answer.headers.get("Content-Type", "text/plain"), answer.content)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        pass


@pytest.fixture
def proxy(pod_routes: Cluster, tmp_path: Path) -> Iterator[Proxy]:
    """A real MLflow server beside the cluster, behind the proxy."""
    with (
        serving_mlflow(f"sqlite:///{tmp_path}/mlflow.db") as uri,
        Proxy((pod_routes.host_address, PORT), Forwarding) as serving,
    ):
        serving.server_uri = uri
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


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
    installation: Installation, proxy: Proxy, tmp_path: Path
) -> None:
    cluster, mlflow = installation.cluster, Server(proxy.server_uri)
    with installation.place() as namespace:
        cluster.apply(secret(proxy.token), namespace)
        tracking = {
            "uri": f"http://{cluster.host_address}:{PORT}",
            "experiment": NAME,
            "secretRef": {"name": SECRET},
        }
        job = small(NAME, telemetry__mlflow=tracking, algorithm__groupsPerStep=2, schedule__maxSteps=STEPS)
        cluster.apply(job, namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 800)
        installation.wait(NAME, namespace, is_true("Tracked"), 400)
        cluster.wait_for("deployment", f"{NAME}-mlflow", lambda found: has_condition(found, "Available"), namespace)

        proxy.token = "the-second-token"
        refused = installation.wait(NAME, namespace, lambda found: condition(found, "Tracked")[1] == "Failing", 400)
        assert "answers 401" in condition(refused, "Tracked")[2]
        cluster.apply(secret(proxy.token), namespace)
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
