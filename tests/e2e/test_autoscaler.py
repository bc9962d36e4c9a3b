"""A job's workers and its engines, scaled by Kubernetes' own autoscaler."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from .cluster.client import Cluster, Object
from .cluster.commands import CommandFailed, eventually
from .cluster.host_server import HostServer, Request, Response
from .cluster.kit import keda_folder
from .installation import JOB, ROOT, Installation, condition, is_true, newest_adapter, small
from .jobs.test_kueue_objects import is_established
from .test_job import engines_of_newest_step, trained_once

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NAME = "elastic"
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
METRIC, WAITING = "kestrl_inference_requests", "state=waiting"
ADAPTER = "metrics-adapter"
NEVER: dict[str, Any] = {"profile": "nvidia", "count": 64}
"""The accelerator of engines that never start: only their number matters here."""


def documented(kind: str) -> list[Object]:
    """The objects of a kind in docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in map(yaml.safe_load, blocks) if block.get("kind") == kind]


def autoscaler(kind: str, target: str, least: int, most: int) -> Object:
    """The autoscaler of docs/operations.md for a kind, with another object, other bounds, and no wait before it scales
    down."""
    autoscalers = documented("HorizontalPodAutoscaler")
    (example,) = [item for item in autoscalers if item["spec"]["scaleTargetRef"]["kind"] == kind]
    spec = example["spec"]
    spec["scaleTargetRef"]["name"] = target
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    return {
        **example,
        "metadata": {"name": NAME},
        "spec": {**spec, "minReplicas": least, "maxReplicas": most, "behavior": behavior},
    }


class MetricsAdapter:
    """The external metrics API, with one metric."""

    waiting = 0
    """Waiting requests of the job's engines."""

    def answer(self, request: Request) -> Response:
        address = urlsplit(request.path)
        known = f"/apis/{GROUP}/{VERSION}"
        if address.path == known:
            kinds = {"kind": "APIResourceList", "groupVersion": f"{GROUP}/{VERSION}", "resources": []}
            return json_response(200, kinds)
        named = re.fullmatch(rf"{known}/namespaces/[^/]+/{METRIC}", address.path)
        if named is None or parse_qs(address.query).get("labelSelector") != [WAITING]:
            return json_response(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})
        metric = {
            "metricName": METRIC,
            "metricLabels": {},
            "timestamp": "2026-01-01T00:00:00Z",
            "value": str(self.waiting),
        }
        content = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
        return json_response(200, {**content, "items": [metric]})


def json_response(status: int, content: Object) -> Response:
    return Response(status, json.dumps(content).encode())


@pytest.fixture
def metrics(pod_routes: Cluster) -> Iterator[MetricsAdapter]:
    """A metrics adapter beside the cluster, which its API server has as that of external metrics."""
    cluster, name = pod_routes, f"{VERSION}.{GROUP}"
    keys = cluster.node.layout.certificates
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "kubelet-server.crt", keys / "kubelet-server.key")
    adapter = MetricsAdapter()
    with HostServer(cluster, adapter.answer, tls=context) as serving, cluster.namespace(ADAPTER) as namespace:
        service = {"name": ADAPTER, "namespace": namespace}
        registration = {
            "group": GROUP,
            "version": VERSION,
            "service": {**service, "port": serving.server_port},
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
        }
        host = {"type": "ExternalName", "externalName": cluster.host_address}
        try:
            cluster.apply(
                [
                    {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": host},
                    {
                        "apiVersion": "apiregistration.k8s.io/v1",
                        "kind": "APIService",
                        "metadata": {"name": name},
                        "spec": registration,
                    },
                ]
            )
            yield adapter
        finally:
            cluster.delete("apiservice", name)  # namespaces are not deleted while an API of them does not answer


@pytest.mark.share
def test_an_autoscaler_scales_a_jobs_workers_and_the_operator_lets_it(installation: Installation) -> None:
    """There are no metrics here, so only its bounds change the count; that it requests metrics of the workers' pods
    shows that it finds them."""
    cluster = installation.cluster
    job = small(NAME, inference__accelerator=NEVER, rollout__replicas=None)
    with installation.place(NAME) as namespace:

        def workers(count: int) -> None:
            cluster.wait_for(
                "deployment", "elastic-rollout", lambda found: found["spec"]["replicas"] == count, namespace, seconds=90
            )

        cluster.apply(job, namespace)
        workers(1)
        cluster.apply(autoscaler("AgentRLJob", NAME, 2, 3), namespace)
        workers(2)
        assert installation.job(NAME, namespace)["spec"]["rollout"]["replicas"] == 2
        seen = cluster.wait_for(
            JOB, NAME, lambda found: found["status"].get("rolloutReplicas") == 2, namespace, seconds=90
        )
        assert condition(seen, "Scheduled")[1] == "Unsatisfiable"
        asked = cluster.wait_for(
            "horizontalpodautoscaler",
            NAME,
            lambda found: condition(found, "ScalingActive")[1] == "FailedGetResourceMetric",
            namespace,
            seconds=90,
        )
        assert condition(asked, "AbleToScale")[0] == "True"
        cluster.apply(autoscaler("AgentRLJob", NAME, 1, 1), namespace)
        workers(1)


@pytest.mark.share(4)
def test_an_autoscaler_moves_a_jobs_engines_by_their_queue_within_the_range(
    installation: Installation, metrics: MetricsAdapter
) -> None:
    """One engine for 16 waiting requests, as documented. Beyond the range the operator sets the range's most."""
    cluster, engines = installation.cluster, f"{NAME}-inference"
    job = small(NAME, inference__accelerator=NEVER, inference__replicas={"min": 1, "max": 3})
    with installation.place(NAME) as namespace:

        def known_to_the_job(count: int) -> None:
            """The operator has seen the number, and left it."""
            cluster.wait_for(
                JOB,
                NAME,
                lambda found: condition(found, "EnginesReady")[2].startswith(f"0/{count}"),
                namespace,
                seconds=90,
            )
            assert cluster.get("statefulset", engines, namespace)["spec"]["replicas"] == count

        cluster.apply(job, namespace)
        known_to_the_job(1)
        metrics.waiting = 40
        cluster.apply(autoscaler("StatefulSet", engines, 1, 3), namespace)
        known_to_the_job(3)
        assert len(cluster.list("pods", namespace, "kestrl.dev/role=inference")) == 3
        metrics.waiting = 20
        known_to_the_job(2)
        cluster.apply(autoscaler("StatefulSet", engines, 1, 8), namespace)
        metrics.waiting = 100
        eventually("the operator sets the most of the range", lambda: out_of_range(cluster, namespace), 90)
        seen = cluster.get("horizontalpodautoscaler", NAME, namespace)
        assert condition(seen, "ScalingActive")[:2] == ("True", "ValidMetricFound")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_an_autoscaler_moves_the_engines_of_a_running_job_without_a_lost_step(
    installation: Installation, metrics: MetricsAdapter
) -> None:
    """One engine joins a job that trains, and leaves it. A suspended job has none, and the autoscaler adds none."""
    cluster, name = installation.cluster, f"{NAME}-inference"
    replicas = {"min": 1, "max": 2}
    with installation.place(NAME) as namespace:

        def engines(count: int) -> None:
            cluster.wait_for(
                "statefulset", name, lambda body: body["status"].get("replicas", 0) == count, namespace, seconds=200
            )

        def trains_on() -> None:
            step = newest_adapter(installation, NAME)
            installation.wait_for_adapter(NAME, namespace, step + 2, 300)

        def sampled_by_two() -> bool:
            return "engine-1" in engines_of_newest_step(installation, NAME)

        job = small(NAME, data__train__size=4000, schedule__maxSteps=1000, inference__replicas=replicas)
        cluster.apply(job, namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 500)
        begun = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}
        metrics.waiting = 32
        cluster.apply(autoscaler("StatefulSet", name, 1, 2), namespace)
        eventually("the second engine samples", sampled_by_two, 500)
        trains_on()
        assert begun < {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}, "no pod was replaced"

        metrics.waiting = 0
        engines(1)
        trains_on()
        assert trained_once(installation, NAME)
        metrics.waiting = 32
        engines(2)

        cluster.patch(JOB, NAME, {"spec": {"suspend": True}}, namespace)
        installation.wait(NAME, namespace, is_true("Suspended"), 300)
        cluster.wait_for(
            "horizontalpodautoscaler",
            NAME,
            lambda found: condition(found, "ScalingActive")[1] == "ScalingDisabled",
            namespace,
            seconds=90,
        )
        assert cluster.get("statefulset", name, namespace)["spec"]["replicas"] == 0


def test_kedas_definition_takes_the_documented_scaled_object(control_plane: Cluster) -> None:
    definition = keda_folder() / "config/crd/bases/keda.sh_scaledobjects.yaml"
    control_plane.apply(definition.read_text())
    try:
        control_plane.wait_for("customresourcedefinition", "scaledobjects.keda.sh", is_established)
        (scaled,) = documented("ScaledObject")
        with control_plane.namespace(NAME) as namespace:
            place = {**scaled, "metadata": {"name": NAME}}
            control_plane.apply(place, namespace)
            wrong = {**place, "spec": {**scaled["spec"], "minReplicas": 2}}
            with pytest.raises(CommandFailed, match="minReplicas"):
                control_plane.apply(wrong, namespace)
            bounds = {"minReplicaCount": 9, "maxReplicaCount": 8}
            with pytest.raises(CommandFailed, match="must be less than or equal to maxReplicaCount"):
                control_plane.apply({**place, "spec": {**scaled["spec"], **bounds}}, namespace)
    finally:
        control_plane.delete("customresourcedefinition", "scaledobjects.keda.sh")


def out_of_range(cluster: Cluster, namespace: str) -> bool:
    """Whether the operator has said that there were more engines than the range allows."""
    events = cluster.list("events.events.k8s.io", namespace)
    return any(event["reason"] == "EnginesOutOfRange" and "is set to 3" in event["note"] for event in events)
