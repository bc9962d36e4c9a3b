"""The pod that sends a run to MLflow: what it gets, what it may reach, and that nothing calls it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.rendering import given, of_kind, rendered

from kestrl._shared.plan.tracking import READY_FILE
from kestrl.errors import UserInputError
from kestrl_operator.render.job import render

NAME = "email-search-mlflow"
URI = "http://mlflow.tracking.svc:8080"
TRACKED = f"telemetry.mlflow={{uri: '{URI}', experiment: mail, sample: 0.1, secretRef: {{name: tracking}}}}"


def pods(objects: list[dict[str, Any]]) -> dict[str, Any]:
    template: dict[str, Any] = of_kind(objects, "Deployment")[NAME]["spec"]["template"]["spec"]
    return template


def test_a_job_without_a_server_has_no_such_pod() -> None:
    assert all(item["metadata"]["name"] != NAME for item in rendered())


def test_it_sends_the_run_with_the_secret_of_the_server_and_no_credential_of_the_job() -> None:
    objects = rendered(TRACKED, store="s3")
    (container,) = pods(objects)["containers"]
    assert (container["name"], container["image"]) == ("mlflow", "r/rollout:1")
    assert container["command"] == ["catatonit", "--", "python", "-m", "kestrl._app.push.pod"]
    assert container["args"] == ["--settings", "/kestrl/settings/mlflow.json"]
    assert container["envFrom"] == [{"secretRef": {"name": "tracking"}}]
    assert {item["name"] for item in container["env"]} == {
        "KESTRL_REPLICA", "HOME", "KESTRL_STORAGE_CREDENTIALS", "NVIDIA_VISIBLE_DEVICES",
    }  # fmt: skip
    assert container["readinessProbe"]["exec"] == {"command": ["test", "-e", READY_FILE]}
    assert "initContainers" not in pods(objects)
    assert pods(objects)["automountServiceAccountToken"] is False
    visible = next(volume for volume in pods(objects)["volumes"] if volume["name"] == "settings")
    assert visible["configMap"]["items"] == [{"key": "mlflow.json", "path": "mlflow.json"}]
    others = [item for name, item in of_kind(objects, "Deployment", "StatefulSet").items() if name != NAME]
    assert "tracking" not in json.dumps([other["spec"]["template"] for other in others])


def test_its_settings_name_the_run_and_the_server() -> None:
    (settings,) = of_kind(rendered(TRACKED), "ConfigMap").values()
    tracking = json.loads(settings["data"]["mlflow.json"])
    assert {name: tracking[name] for name in ("job", "run", "storage", "uri", "experiment", "sample")} == {
        "job": "email-search",
        "run": "email-search-1",
        "storage": "s3://bucket/email-search-1",
        "uri": URI,
        "experiment": "mail",
        "sample": 0.1,
    }
    assert tracking["settings"]["algorithm"]["groupSize"] == given().job.spec.algorithm.group_size


def test_it_reaches_storage_and_the_server_and_nobody_reaches_it() -> None:
    objects = rendered(TRACKED)
    policy = of_kind(objects, "NetworkPolicy")[NAME]["spec"]
    assert policy["ingress"] == []
    assert policy["egress"][-1] == {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracking"}}}],
        "ports": [{"port": 8080, "protocol": "TCP"}],
    }
    assert not [name for name in of_kind(objects, "Service", "PodDisruptionBudget") if name == NAME]


def test_a_port_that_pods_must_not_reach_is_refused_by_field() -> None:
    with pytest.raises(UserInputError, match=r"spec\.telemetry\.mlflow\.uri: port 5000 is not one that pods of jobs"):
        rendered("telemetry.mlflow={uri: 'http://mlflow.tracking.svc:5000'}")
    rendered("telemetry.mlflow={uri: 'http://mlflow.tracking.svc:5000'}", values={"egress_ports": [443, 5000]})


def test_one_pod_at_a_time_sends_a_run_and_none_of_a_suspended_job() -> None:
    workload = of_kind(rendered(TRACKED), "Deployment")[NAME]["spec"]
    assert (workload["replicas"], workload["strategy"]) == (1, {"type": "Recreate"})
    assert workload["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    assert of_kind(render(given(TRACKED, parked=True)), "Deployment")[NAME]["spec"]["replicas"] == 0
