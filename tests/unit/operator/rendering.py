"""Rendering of the quickstart for a cluster, as tests need it."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.samples import job

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.planning import plan
from kestrl_operator.render import Given, render
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.cluster import site_of

VALUES: dict[str, Any] = {
    "images": {
        "engine": {
            "cpu": "r/engine-cpu:1",
            "cuda": "vllm/vllm-openai:v0.32.0",
            "npu": "quay.io/ascend/vllm-ascend:v0.23.0",
            "npu-a3": "quay.io/ascend/vllm-ascend:v0.23.0-a3",
        },
        "sglang": {"cuda": "r/sglang-cuda:1"},
        "learner": {
            "cpu": "r/learner-cpu:1",
            "cuda": "r/learner-cuda:1",
            "npu": "r/learner-npu:1",
            "npu-a3": "r/learner-npu-a3:1",
        },
        "agent": "r/agent:1",
        "rollout": "r/rollout:1",
        "tools": "r/tools:1",
        "judge": "r/judge:1",
    }
}
NVIDIA = ("inference.accelerator={profile: nvidia, count: 2}", "learner.accelerator={profile: nvidia}")
ASCEND = ("inference.accelerator={profile: ascend, count: 1}", "learner.accelerator={profile: ascend}")


SECRETS = {secret.value: f"value-of-{secret.name}" for secret in Secret}
ROLES = ("inference", "tools", "judge", "rollout", "learner")


def given(*overrides: str, values: dict[str, Any] | None = None, **changes: Any) -> Given:
    """Inputs of rendering: the quickstart with overrides, the chart's values with changes."""
    one, cluster = job(*overrides), read_cluster({**VALUES, **(values or {})})
    site = site_of(one, "team-a", cluster, run="email-search-1", storage="s3://bucket/email-search-1")
    plain: dict[str, Any] = {"job": one, "namespace": "team-a", "uid": "u-1", "cluster": cluster, "secrets": SECRETS}
    plain["storage"] = "s3://bucket"
    return Given(**(plain | {"components": plan(one, site)} | changes))


def rendered(*overrides: str, values: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    return render(given(*overrides, values=values, **changes))


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] in kinds}
