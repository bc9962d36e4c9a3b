"""Where pods keep a model that they download: a volume of the cluster's, or a requested place on their node's disk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.rendering import of_kind, rendered
from tests.unit.operator.samples import job
from tests.unit.operator.sft_samples import sft_rendered

from kestrl.errors import UserInputError
from kestrl_operator.render.quota import quota_request
from kestrl_operator.state.chart_values import read_cluster

HUB, STORED, CLAIMED = "model.base=hf://org/model", "model.base=s3://bucket/model", "model.base=pvc://models/qwen"
CLAIM: dict[str, Any] = {"modelCache": {"claim": "models"}}
NODE: dict[str, Any] = {"modelCache": {"nodePath": "/var/lib/models"}}
LOADING = {"inference": "engine", "learner": "learner"}
"""The container that loads a model with its weights, by role."""
DISK = "ephemeral-storage"


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name.removeprefix("email-search-"): item["spec"]["template"]["spec"]
        for name, item in of_kind(objects, "Deployment", "StatefulSet").items()
    }


def mounts(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        item["name"]: mount
        for item in (*spec.get("initContainers", ()), *spec["containers"])
        for mount in item["volumeMounts"]
        if mount["name"] == "model-cache"
    }


def disks(objects: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (role, item["name"]): item["resources"]["requests"][DISK]
        for role, spec in pods(objects).items()
        for item in spec["containers"]
        if DISK in item["resources"].get("requests", {})
    }


def volume(spec: dict[str, Any]) -> dict[str, Any] | None:
    return next((item for item in spec["volumes"] if item["name"] == "model-cache"), None)


def prepares(objects: list[dict[str, Any]]) -> dict[str, str]:
    (settings,) = of_kind(objects, "ConfigMap").values()
    files = {name: text for name, text in settings["data"].items() if name.startswith("prepare-")}
    return {
        name.removeprefix("prepare-").removesuffix(".json"): json.loads(text)["model_cache"]
        for name, text in files.items()
    }


@pytest.mark.parametrize("model", [HUB, STORED])
def test_pods_that_load_a_model_share_a_claim(model: str) -> None:
    objects = rendered(model, values=CLAIM)
    for role, spec in pods(objects).items():
        if role not in LOADING:
            assert (volume(spec), mounts(spec)) == (None, {}), role
            continue
        assert volume(spec) == {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}}
        writing = mounts(spec).pop("prepare")
        assert writing == {"name": "model-cache", "mountPath": "/kestrl/cache"}
        assert mounts(spec)[LOADING[role]] == {**writing, "readOnly": True}
    paths = prepares(objects)
    assert {role for role, path in paths.items() if path} == set(LOADING)
    assert {paths[role] for role in LOADING} == {"/kestrl/cache"}
    assert disks(objects) == {}, "their node's disk has none of it"


def test_a_folder_of_the_node_has_one_for_each_namespace() -> None:
    objects = rendered(HUB, values=NODE)
    for role in LOADING:
        spec = pods(objects)[role]
        path = {"path": "/var/lib/models", "type": "Directory"}
        assert volume(spec) == {"name": "model-cache", "hostPath": path}
        assert {mount["subPath"] for mount in mounts(spec).values()} == {"team-a"}


@pytest.mark.parametrize("model", ["model.base=demo://tiny", CLAIMED])
def test_a_model_that_nobody_downloads_needs_neither(model: str) -> None:
    objects = rendered(model, values=CLAIM)
    assert all(volume(spec) is None for spec in pods(objects).values())
    assert not any(prepares(objects).values())
    assert disks(rendered(model)) == {}


@pytest.mark.parametrize("model", [HUB, STORED])
def test_without_a_cache_pods_request_a_place_on_their_nodes_disk(model: str) -> None:
    objects = rendered(model)
    assert not any(prepares(objects).values())
    assert disks(objects) == {("inference", "engine"): "2Gi", ("learner", "learner"): "2Gi"}


def test_the_request_is_the_administrators_and_the_jobs_to_change() -> None:
    values = {"resources": {"engine": {"requests": {DISK: "40Gi"}}, "learner": {"limits": {DISK: "60Gi"}}}}
    assert disks(rendered(HUB, values=values)) == {("inference", "engine"): "40Gi"}, "a limit is the request, too"
    engine = "{name: engine, resources: {requests: {ephemeral-storage: 80Gi}}}"
    patch = f"{{role: inference, template: {{spec: {{containers: [{engine}]}}}}}}"
    assert disks(rendered(HUB, f"patches=[{patch}]"))["inference", "engine"] == "80Gi"
    learner = "{name: learner, resources: {limits: {ephemeral-storage: 1Gi}}}"
    patch = f"{{role: learner, template: {{spec: {{containers: [{learner}]}}}}}}"
    assert disks(rendered(HUB, f"patches=[{patch}]"))["learner", "learner"] == "1Gi", "no request exceeds its limit"


def test_a_queue_is_asked_for_the_disk_only_by_name() -> None:
    """Kueue admits nothing that asks for a resource of which its queue has no quota."""
    assert disks(rendered(HUB, queue="team-a")) == {}
    spec = job(HUB).spec

    def asked(objects: list[dict[str, Any]]) -> str:
        return json.dumps(quota_request(spec, objects, "team-a", "").pod_sets)

    assert DISK not in asked(rendered(HUB))
    assert DISK in asked(rendered(HUB, values={"resources": {"engine": {"requests": {DISK: "40Gi"}}}}))


def test_a_job_of_supervised_training_has_the_cache_and_the_request_too() -> None:
    def pod(**changes: Any) -> dict[str, Any]:
        spec: dict[str, Any] = sft_rendered(**changes)[-1]["spec"]["template"]["spec"]
        return spec

    (container,) = pod()["containers"]
    assert container["resources"]["requests"][DISK] == "2Gi"
    cached = pod(values=CLAIM)
    assert volume(cached) == {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}}
    assert DISK not in cached["containers"][0]["resources"]["requests"]
    assert mounts(cached).keys() == {"prepare", *(item["name"] for item in cached["containers"])}


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"claim": "models", "nodePath": "/models"}, "give either claim or nodePath"),
        ({"nodePath": "models"}, "modelCache.nodePath"),
        ({"nodePath": "/models/../etc"}, "modelCache.nodePath"),
        ({"claim": "Models"}, "modelCache.claim"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(cache: dict[str, str], message: str) -> None:
    images: dict[str, Any] = {
        "engine": {},
        "learner": {},
        **dict.fromkeys(("agent", "rollout", "tools", "judge"), "r/image:1"),
    }
    with pytest.raises(UserInputError, match=message):
        read_cluster({"images": images, "modelCache": cache})
