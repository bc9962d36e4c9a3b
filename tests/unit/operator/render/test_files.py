"""The volume with the files that tools read, as objects of a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.rendering import given, of_kind, rendered
from tests.unit.operator.samples import job
from tests.unit.operator.samples import pod as observed_pod

from kestrl._shared.plan.components import Role
from kestrl.errors import UserInputError
from kestrl_operator.controllers.manifests import _check_files  # pyright: ignore[reportPrivateUsage]
from kestrl_operator.render.job import render
from kestrl_operator.status.pods import downloading

DIGEST = "a" * 64
URI = f"s3://bucket/mail.sqlite#sha256={DIGEST}"
FILES = f"data.files=[{{uri: '{URI}', size: 4Gi, timeout: 30m}}]"
TARGET = f"/kestrl/files/{DIGEST}/mail.sqlite"


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return of_kind(objects, "Deployment", "StatefulSet")


def pod(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    template: dict[str, Any] = workloads(objects)[f"email-search-{role}"]["spec"]["template"]["spec"]
    return template


def volumes(spec: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in spec["volumes"]}


def mounted(container: dict[str, Any]) -> dict[str, Any] | None:
    return next((each for each in container["volumeMounts"] if each["name"] == "files"), None)


def test_a_job_without_files_has_no_volume_for_them() -> None:
    objects = rendered()
    assert "email-search-files" not in workloads(objects)
    assert all("files" not in volumes(each["spec"]["template"]["spec"]) for each in workloads(objects).values())


def test_one_pod_fetches_them_into_a_claim_of_their_size() -> None:
    spec = workloads(rendered(FILES, store="s3"))["email-search-files"]["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}
    template = spec["template"]["spec"]
    (fetching,), (holding,) = template["initContainers"], template["containers"]
    assert fetching["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert mounted(fetching) == {"name": "files", "mountPath": "/kestrl/files"}
    assert holding["command"][-2:] == ["-m", "kestrl._shared.processes.hold"]
    assert "envFrom" not in holding


def test_tools_mount_it_read_only_and_get_no_credential_and_no_way_out() -> None:
    objects = rendered(FILES, store="s3")
    tools = pod(objects, "tools")
    assert volumes(tools)["files"]["persistentVolumeClaim"] == {
        "claimName": "files-email-search-files-0",
        "readOnly": True,
    }
    for container in (*tools["initContainers"], *tools["containers"]):
        assert mounted(container) == {"name": "files", "mountPath": "/kestrl/files", "readOnly": True}
        assert "envFrom" not in container
    policies = of_kind(objects, "NetworkPolicy")
    assert policies["email-search-tools"]["spec"]["egress"] == []
    assert policies["email-search-files"]["spec"]["ingress"] == []
    assert {"port": 443, "protocol": "TCP"} in policies["email-search-files"]["spec"]["egress"][1]["ports"]


def test_tools_run_where_the_volume_is() -> None:
    objects = rendered(FILES)
    (near,) = pod(objects, "tools")["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["labelSelector"]["matchLabels"] == {"kestrl.dev/job": "email-search", "kestrl.dev/role": "files"}
    (wish,) = pod(objects, "files")["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["labelSelector"]["matchLabels"]["kestrl.dev/role"] == "tools"


def test_rows_and_config_name_the_file_by_its_uri() -> None:
    config = f"tools=[{{name: search, use: 'mine:Search', config: {{database: '{URI}'}}}}]"
    (settings,) = of_kind(rendered(FILES, config), "ConfigMap").values()
    tools, preparing, fetching = (
        json.loads(settings["data"][name]) for name in ("tools.json", "prepare-tools.json", "prepare-files.json")
    )
    assert tools["files"] == {URI: TARGET}
    assert tools["tools"][0]["config"] == {"database": TARGET}
    assert (preparing["fetches"], fetching["fetches"]) == (False, True)
    assert preparing["files"] == fetching["files"]
    assert fetching["files"][0] == {
        "address": "s3://bucket/mail.sqlite",
        "digest": DIGEST,
        "target": TARGET,
        "most_bytes": 4 * 2**30,
        "seconds": 1800.0,
        "field": "spec.data.files[0]",
    }


def test_a_file_of_one_machine_is_refused_on_a_cluster() -> None:
    with pytest.raises(UserInputError, match=r"spec\.data\.files\[0\]\.uri: 'mail\.sqlite' is a place on one machine"):
        _check_files(job("data.files=[{uri: mail.sqlite, size: 1Gi}]"))
    _check_files(job(FILES))


def test_a_suspended_job_keeps_the_volume_and_no_pod() -> None:
    assert workloads(render(given(FILES, parked=True)))["email-search-files"]["spec"]["replicas"] == 0


def test_a_status_says_that_files_are_downloaded() -> None:
    spec = job(FILES).spec
    waiting = observed_pod(Role.FILES, ready=False, begun=False, phase="Pending")
    assert downloading([waiting], spec) == (
        "1 file of spec.data.files of up to 5 GiB are downloaded within 30m; `kubectl logs email-search-files-0 -c "
        "prepare` says how far it is"
    )
    assert downloading([observed_pod(Role.FILES)], spec) == ""
    assert downloading([], job().spec) == ""
