"""docs/try-on-kubernetes.md: what its commands name, exists.

Those for a cluster of this machine are executed by `tests/e2e/trial/test_trial.py`; those for kind and minikube cannot
be executed without a registry of images.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.unit.docs.kubernetes_page import ELSEWHERE, HERE, PAGE, ROOT, commands, section

from kestrl._shared.spec import read_job
from kestrl_operator.state.chart_values import read_cluster

CHART = ROOT / "charts" / "kestrl"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
NOT_HERE = ("kind ", "minikube ", "scripts/build_images", "for name in ", "kubectl ", "helm ")
"""Commands that need a registry of images, or the cluster that they made."""
FAKE_DOCKER = """#!/bin/sh
[ "$1" = build ] || exit 0
while [ $# -gt 0 ]; do [ "$1" != --tag ] || echo "$2" >>"$BUILT"; shift; done
"""


def test_every_command_is_executed_or_named_as_one_that_cannot_be() -> None:
    shown = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert shown == [HERE, ELSEWHERE]
    assert len(commands(HERE)) == 5
    assert [command for command in commands(ELSEWHERE) if not command.startswith(NOT_HERE)] == []
    assert "**not run**" in PAGE.read_text()


@pytest.fixture
def built(tmp_path: Path) -> set[str]:
    """The images that the page's one command builds, with a docker that only notes their names."""
    program, names = tmp_path / "docker", tmp_path / "names"
    program.write_text(FAKE_DOCKER)
    program.chmod(0o755)
    assert "scripts/build_images" in commands(ELSEWHERE)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BUILT": str(names)}
    subprocess.run([ROOT / "scripts" / "build_images"], env=environment, check=True, capture_output=True, timeout=30)
    return set(names.read_text().split())


def test_the_images_that_are_built_and_loaded_are_those_that_the_chart_runs_on_cpus(built: set[str]) -> None:
    images = VALUES["jobs"]["images"]
    run = {VALUES["operator"]["image"], images["engine"]["cpu"], images["learner"]["cpu"]}
    run |= {images[name] for name in ("agent", "rollout", "tools", "judge")}
    assert built == run | {VALUES["page"]["image"]}
    loops = [command for command in commands(ELSEWHERE) if command.startswith("for ")]
    assert len(loops) == 2
    for loop in loops:
        names = re.findall(r"[\w-]+", loop.partition(" in ")[2].partition(";")[0])
        ((pattern),) = re.findall(r'"(\S+\$name\S+)"', loop)
        assert {pattern.replace("$name", name) for name in names} == run


def test_the_chart_takes_the_page_s_settings_and_jobs_reach_the_page_s_storage() -> None:
    (install,) = [command for command in commands(ELSEWHERE) if command.startswith("helm install")]
    words = shlex.split(install)
    assert (ROOT / words[3] / "Chart.yaml").exists()
    for pair in words[words.index("--set") + 1].split(","):
        name, _, text = pair.partition("=")
        *path, last = name.split(".")
        place = VALUES
        for part in path:
            place = place[part]
        assert last in place
        place[last] = text
    jsonschema.validate(VALUES, json.loads((CHART / "values.schema.json").read_text()))
    storage = yaml.safe_load(re.findall(r"```yaml\n(.*?)^```", section(ELSEWHERE), re.MULTILINE | re.DOTALL)[0])
    pod, service, secret = storage["items"]
    cluster = read_cluster(VALUES["jobs"])
    (port,) = (item["port"] for item in service["spec"]["ports"])
    assert port in cluster.egress_ports
    assert f":{port}" in pod["spec"]["containers"][0]["args"]
    assert secret["stringData"]["AWS_ENDPOINT_URL"] == f"http://s3.team-a.svc:{port}"
    assert {"uri": "s3://runs/trial", "secret": secret["metadata"]["name"]}.items() <= VALUES["jobs"]["storage"].items()
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == "/data/runs", "the bucket"


def test_the_page_s_manifests_are_there() -> None:
    (apply,) = [command for command in commands(ELSEWHERE) if "quickstart" in command]
    assert read_job(ROOT / shlex.split(apply)[-1]).metadata.name == "email-search"
