"""Values that concern every object of a release: a registry, labels, further objects, the form of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrl_operator.config import read_config

from .conftest import Helm, Rendered

pytestmark = pytest.mark.helm
MIRROR = "registry.example/mirror"


def container(objects: Rendered) -> dict[str, Any]:
    return objects.one("Deployment")["spec"]["template"]["spec"]["containers"][0]


def test_a_registry_replaces_that_of_every_image(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render({"global": {"registry": f"{MIRROR}/", "of-another-chart": True}})
    assert container(objects)["image"].startswith(f"{MIRROR}/kestrl/operator:")
    assert objects.one("Pod")["spec"]["containers"][0]["image"] == container(objects)["image"]
    (text,) = (item["data"]["operator.yaml"] for item in objects if "operator.yaml" in item.get("data", {}))
    (tmp_path / "operator.yaml").write_text(text)
    images = read_config(tmp_path / "operator.yaml").jobs.images
    names = [images.agent, images.rollout, *images.engine.values(), *images.sglang.values(), *images.learner.values()]
    assert all(name.startswith(f"{MIRROR}/kestrl/") for name in names), names
    assert images.pull_policy == "IfNotPresent"


def test_the_page_has_the_registry_and_the_labels_too(helm: Helm) -> None:
    page = {"namespaces": [{"namespace": "team-a", "uri": "s3://runs/team-a"}]}
    objects = helm.render({"global": {"registry": MIRROR}, "commonLabels": {"team": "platform"}, "page": page})
    (deployment,) = (
        item for item in objects if item["kind"] == "Deployment" and item["metadata"]["name"] == "kestrl-page"
    )
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    assert pod["image"].startswith(f"{MIRROR}/kestrl/")
    assert deployment["metadata"]["labels"]["team"] == "platform"
    assert "team" not in deployment["spec"]["selector"]["matchLabels"]


def test_a_digest_stays_with_its_image(helm: Helm) -> None:
    image = "ghcr.io/kestrl/operator:0.1.0@sha256:" + "a" * 64
    objects = helm.render({"global": {"registry": MIRROR}, "operator": {"image": image}})
    assert container(objects)["image"] == image.replace("ghcr.io", MIRROR)


@pytest.mark.parametrize(
    "image", ["team/operator:1.2.0", "operator:1.2.0", "localhost/operator:1", "r.example:5000/o:1"]
)
def test_a_name_without_a_registry_gets_one(helm: Helm, image: str) -> None:
    objects = helm.render({"global": {"registry": MIRROR}, "operator": {"image": image}})
    path = image.removeprefix("localhost/").removeprefix("r.example:5000/")
    assert container(objects)["image"] == f"{MIRROR}/{path}"


def test_labels_are_on_every_object_and_select_nothing(helm: Helm) -> None:
    objects = helm.render({"commonLabels": {"team": "platform", "app.kubernetes.io/name": "another"}})
    unlabelled = [item["metadata"]["name"] for item in objects if item["metadata"]["labels"].get("team") != "platform"]
    assert not unlabelled
    deployment = objects.one("Deployment")["spec"]
    assert "team" not in deployment["selector"]["matchLabels"]
    assert (
        deployment["template"]["metadata"]["labels"].items()
        >= {
            **deployment["selector"]["matchLabels"],
            "team": "platform",
        }.items()
    )
    assert objects.one("Deployment")["metadata"]["labels"]["app.kubernetes.io/name"] == "kestrl-operator"


def test_further_objects_are_templates(helm: Helm) -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-notes"}}
    plain = {item["metadata"]["name"] for item in helm.render()}
    objects = helm.render({"extraObjects": [extra]})
    assert {item["metadata"]["name"] for item in objects} - plain == {"kestrl-notes"}


def test_the_log_has_a_level_and_a_form(helm: Helm) -> None:
    objects = helm.render({"operator": {"logs": {"level": "DEBUG", "format": "json"}}})
    variables = {item["name"]: item.get("value") for item in container(objects)["env"]}
    assert (variables["KESTRL_LOG_LEVEL"], variables["KESTRL_LOG_FORMAT"]) == ("DEBUG", "json")


@pytest.mark.parametrize(
    "values", [{"operator": {"logs": {"format": "xml"}}}, {"commonLabels": {"a": 1}}, {"extraObjects": {"a": 1}}]
)
def test_what_fits_no_value_is_refused(helm: Helm, values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    ended = helm.run("template", "kestrl", "charts/kestrl", "--values", str(tmp_path / "values.yaml"))
    assert ended.returncode != 0
    assert next(iter(values)) in ended.stderr
