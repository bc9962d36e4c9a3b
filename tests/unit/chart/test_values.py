"""The chart's values, what is generated of them, and what the operator makes of them. No Helm needed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from kestrl._shared.spec import read_job
from kestrl_operator.state.chart_values import Cluster, read_cluster

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "kestrl"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_chart", ROOT / "scripts" / "gen_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def test_generated_files_are_what_the_values_give(generator: ModuleType) -> None:
    for path, text in generator.files():
        assert path.read_text() == text, f"{path} is stale; run `make gen`"


def test_the_operator_takes_the_section_jobs_as_it_stands(values: dict[str, Any]) -> None:
    cluster = read_cluster(values["jobs"])
    assert cluster == Cluster(images=cluster.images), "a default of the chart is not the operator's"
    assert cluster.model_dump(by_alias=True).keys() == values["jobs"].keys(), "a value of the operator is not shown"


def test_images_are_of_the_chart_s_own_version(values: dict[str, Any]) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert chart["version"] == chart["appVersion"] == project[1]
    images = [image for image in json.dumps(values).split('"') if image.startswith("ghcr.io/")]
    assert len(images) == 15
    assert {image.rpartition(":")[2] for image in images} == {chart["appVersion"]}


def test_the_values_are_what_the_schema_says(values: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(values, schema)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 2},
        {"operator": {"replica": 2}},
        {"operator": {"replicas": "2"}},
        {"operator": {"workers": 0}},
        {"operator": {"auditSeconds": 1}},
        {"operator": {"pullPolicy": "Sometimes"}},
        {"operator": {"podLabels": {"a": 1}}},
        {"operator": {"resources": {"limits": {"memory": "much"}}}},
        {"monitoring": {"serviceMonitor": {"enabled": "auto"}}},
        {"namespaces": "team-a"},
        {"jobs": {"image": {}}},
        {"jobs": {"images": {"pullPolicy": "Sometimes"}}},
        {"jobs": {"accelerators": {"mine": {"image": "tpu"}}}},
        {"jobs": {"accelerators": {"mine": {"resources": "x"}}}},
        {"jobs": {"resources": {"sidecar": {}}}},
        {"jobs": {"storage": {"url": "s3://b"}}},
    ],
    ids=str,
)
def test_what_no_value_is_called_or_can_be_is_refused(wrong: dict[str, Any], schema: dict[str, Any]) -> None:
    images = {"engine": {}, "learner": {}, "agent": "", "rollout": "", "tools": "", "judge": ""}
    if "jobs" in wrong:
        wrong = {"jobs": {"images": images, **wrong["jobs"]}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_the_schema_closes_every_object_that_has_keys_of_its_own(schema: dict[str, Any]) -> None:
    def open_ones(node: Any, path: str) -> list[str]:
        if isinstance(node, list):
            return [found for item in node for found in open_ones(item, path)]
        if not isinstance(node, dict):
            return []
        own = [path] if "properties" in node and node.get("additionalProperties") is not False else []
        return own + [found for key, item in node.items() for found in open_ones(item, f"{path}/{key}")]

    assert open_ones({key: item for key, item in schema.items() if key != "properties"}, "") == []
    assert open_ones(schema["properties"], "") == ["/global"], "a chart around this one has values there of its own"


def test_a_value_without_a_comment_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(generator.ValuesError, match=r"a\.b has no comment"):
        generator.read_values("# The a.\na:\n  b: 1\n")


@pytest.mark.parametrize(("text", "complaint"), [
    ("# It.\n# @typ string\na: null\n", "unknown hint @typ"),
    ("# It.\n# @type text\na: null\n", "@type text"),
    ("# It.\na: null\n", "a needs a line"),
    ("# It.\na: []\n", "a needs a line"),
])  # fmt: skip
def test_a_type_that_cannot_be_known_is_an_error(generator: ModuleType, text: str, complaint: str) -> None:
    with pytest.raises(generator.ValuesError, match=complaint):
        generator.chart_schema(generator.read_values(text))


def test_a_value_of_the_operator_that_the_chart_does_not_show_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(generator.ValuesError, match=r"jobs\.images"):
        generator.chart_schema(generator.read_values("# Jobs.\njobs:\n  # The domain.\n  domain: svc\n"))


def test_the_job_of_helm_test_is_a_job_of_two_steps() -> None:
    job = read_job(CHART / "files" / "test-job.yaml", ())
    assert job.spec.schedule.max_steps == 2
    assert job.spec.storage.uri is None, "the chart's default is what is tested"
    assert job.spec.inference.accelerator.profile == job.spec.learner.accelerator.profile == "cpu"


@pytest.mark.parametrize(
    ("uri", "accepted"),
    [(None, True), ("s3://bucket/runs", True), ("gs://b", True), ("file:///x", False), ("nonsense", False)],
)
def test_the_default_storage_is_a_place_that_all_pods_reach(
    schema: dict[str, Any], values: dict[str, Any], uri: str | None, accepted: bool
) -> None:
    changed = {**values, "jobs": {**values["jobs"], "storage": {"uri": uri, "secret": None}}}
    assert jsonschema.Draft202012Validator(schema).is_valid(changed) == accepted
