"""The page of a namespace: what the chart makes, and that the program takes its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stored_runs import make_stored_run
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._shared.plan.servers import METADATA

from .conftest import Helm, Rendered

pytestmark = pytest.mark.helm
NAME = "kestrl-page"
TEAM = {"namespace": "team-a", "uri": "s3://bucket/runs", "secret": "storage"}


def pages(helm: Helm, *places: dict[str, Any], **values: Any) -> Rendered:
    """The objects of pages."""
    objects = helm.render({"page": {"namespaces": list(places)}, **values})
    return Rendered(item for item in objects if item["metadata"]["name"] == NAME)


def container(objects: Rendered) -> dict[str, Any]:
    (only,) = objects.one("Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def test_without_namespaces_there_is_none(helm: Helm) -> None:
    assert pages(helm) == []


def test_a_namespace_gets_a_page_with_its_own_credentials_and_nothing_else(helm: Helm) -> None:
    objects = pages(helm, TEAM)
    assert sorted(item["kind"] for item in objects) == ["Deployment", "NetworkPolicy", "ServiceAccount"]
    assert {item["metadata"]["namespace"] for item in objects} == {"team-a"}
    spec = objects.one("Deployment")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    only = container(objects)
    assert only["command"] == ["kestrl", "ui", "s3://bucket/runs", "--port", "8123"]
    assert only["envFrom"] == [{"secretRef": {"name": "storage"}}]
    assert "ports" not in only, "it listens on loopback alone"
    security = only["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    policy = objects.one("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == objects.one("Deployment")["spec"]["selector"]["matchLabels"]
    assert policy["ingress"] == []
    assert set(policy["egress"][1]["to"][0]["ipBlock"]["except"]) == set(METADATA)
    assert {"port": 9000, "protocol": "TCP"} in policy["egress"][1]["ports"]


def test_the_default_storage_has_its_own_secret(helm: Helm) -> None:
    jobs = {"storage": {"uri": "s3://shared/runs", "secret": "shared"}}
    default = container(pages(helm, {"namespace": "team-a", "readOnly": True}, jobs=jobs))
    assert default["command"][2:] == ["s3://shared/runs", "--port", "8123", "--read-only"]
    assert default["envFrom"] == [{"secretRef": {"name": "shared"}}]
    other = container(pages(helm, {"namespace": "team-a", "uri": "s3://other/runs"}, jobs=jobs))
    assert "envFrom" not in other, "the credentials of one storage are not sent to another"


def test_a_page_without_storage_is_refused(helm: Helm) -> None:
    refusal = helm.refusal({"page": {"namespaces": [{"namespace": "team-a"}]}})
    assert "page.namespaces: team-a names no uri, and jobs.storage.uri is null" in refusal


def test_the_program_takes_the_command(helm: Helm, tmp_path: Path) -> None:
    make_stored_run(tmp_path / "bucket" / "job-1")
    address = (tmp_path / "bucket").as_uri()
    command = container(pages(helm, {**TEAM, "uri": address, "readOnly": True}))["command"]
    shown = CliRunner().invoke(app, [*command[1:], "--export", str(tmp_path / "site")])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "site" / "runs" / "job-1").is_dir()
