"""A cluster as a site: the same plan as on one machine, with the addresses of Services and pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl.errors import UserInputError
from kestrl_operator.state.chart_values import Cluster, read_cluster
from kestrl_operator.state.cluster import site_of, storage_of

QUICKSTART = Path(__file__).parents[4] / "examples" / "email-search" / "quickstart.yaml"
VALUES: dict[str, Any] = {
    "images": {
        "engine": {"cpu": "r/engine-cpu:1", "cuda": "vllm/vllm-openai:v0.32.0"},
        "learner": {"cpu": "r/learner-cpu:1"},
        "agent": "r/agent:1",
        "rollout": "r/rollout:1",
        "tools": "r/tools:1",
        "judge": "r/judge:1",
    }
}


def planned(*overrides: str) -> dict[str, Component]:
    job: AgentRLJob = read_job(QUICKSTART, overrides)
    site = site_of(job, "team-a", read_cluster(VALUES), run="email-search-1", storage="s3://bucket/email-search-1")
    return {component.name: component for component in plan(job, site)}


def test_the_learner_finds_engines_and_workers_by_name() -> None:
    settings = planned()["learner-0"].settings
    assert isinstance(settings, LearnerSettings)
    assert settings.engine_agents == "dns://email-search-inference.team-a.svc:7000"
    assert (settings.engines, settings.engines_file) == ((), None)
    assert settings.rollout_addresses == ("dns://email-search-rollout.team-a.svc:7000",)
    assert settings.storage == "s3://bucket/email-search-1"
    assert settings.database == "sqlite:////kestrl/state/ledger.db"


def test_a_judge_finds_the_jobs_engines_by_name() -> None:
    settings = planned("rewards=[{ruler: {self: true}}]")["judge-0"].settings
    assert isinstance(settings, JudgeSettings)
    assert settings.ruler is not None
    assert settings.ruler.judges[0].base_urls == ("dns://email-search-inference.team-a.svc:8000/v1",)


def test_workers_find_tools_and_judge_by_their_services() -> None:
    settings = planned()["rollout-0"].settings
    assert isinstance(settings, RolloutSettings)
    assert settings.tools_address == "email-search-tools.team-a.svc:7000"
    assert settings.judge_address == "email-search-judge.team-a.svc:7000"
    assert (settings.listen, settings.metrics_listen) == ("0.0.0.0:7000", "0.0.0.0:9464")


def test_one_component_stands_for_all_replicas_of_a_role() -> None:
    """One pod template serves all replicas, so a job of many costs the operator no more than one of few."""
    few, many = planned(), planned("inference.replicas=256", "rollout.replicas=1024")
    assert list(many) == list(few) == ["engine-0", "inference-0", "tools-0", "judge-0", "rollout-0", "learner-0"]
    for name in ("engine-0", "inference-0", "rollout-0", "judge-0", "learner-0"):
        assert many[name] == few[name]
    assert all(part.ports == {"grpc": 7000, "metrics": 9464} for part in few.values() if part.role is not Role.ENGINE)


def test_a_pods_name_and_ordinal_tell_replicas_of_one_settings_file_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, paths = planned(), dict[str, Path]()
    for name in ("rollout", "inference"):
        settings = parts[f"{name}-0"].settings
        assert settings is not None
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(settings.model_dump_json())
    assert RolloutSettings.read(paths["rollout"]).component == "rollout-0"
    assert AgentSettings.read(paths["inference"]).engine_name == "engine-0"
    monkeypatch.setenv("KESTRL_REPLICA", "email-search-rollout-7d4-x2x")
    assert RolloutSettings.read(paths["rollout"]).component == "rollout-email-search-rollout-7d4-x2x"
    monkeypatch.setenv("KESTRL_REPLICA", "email-search-inference-17")
    monkeypatch.setenv("KESTRL_INDEX", "17")
    agent = AgentSettings.read(paths["inference"])
    assert (agent.engine_name, agent.engine_url) == ("engine-17", "http://127.0.0.1:8000")
    assert agent.reported_url == "http://email-search-inference-17.email-search-inference.team-a.svc:8000"


def test_data_keeps_its_kind() -> None:
    settings = planned("data.train={uri: s3://b/rows.parquet}", "data.validation={uri: v.jsonl}")["learner-0"].settings
    assert isinstance(settings, LearnerSettings)
    assert settings.data.path == "/kestrl/data/train.parquet"
    assert settings.validation is not None
    assert settings.validation.path == "/kestrl/data/validation.jsonl"


def test_a_profile_of_the_chart_adds_to_the_built_in_ones() -> None:
    cluster: Cluster = read_cluster(
        {**VALUES, "accelerators": {"mig": {"resource": "nvidia.com/mig-1g.10gb", "image": "cuda"}}}
    )
    assert cluster.profile("mig").resource == "nvidia.com/mig-1g.10gb"
    with pytest.raises(UserInputError, match=r"'tpu' is not one of ascend, ascend-a2, ascend-a3, .*, cpu, mig, nvidia"):
        cluster.profile("tpu")


DEFAULT = {"storage": {"uri": "s3://house/jobs", "secret": "house"}}
OWN = "storage={uri: 'gs://mine'}"


@pytest.mark.parametrize(
    ("values", "overrides", "found"),
    [
        (DEFAULT, (), ("s3://house/jobs", "house")),
        ({"storage": {"uri": "az://house"}}, (), ("az://house", None)),
        ({}, (OWN,), ("gs://mine", None)),
        ({}, ("storage={uri: 's3://mine', secretRef: {name: keys}}",), ("s3://mine", "keys")),
        (DEFAULT, (OWN,), ("gs://mine", None)),
        (DEFAULT, ("storage={secretRef: {name: keys}}",), ("s3://house/jobs", "keys")),
    ],
    ids=["the default", "a default that needs no key", "its own", "its own with a key",
    "its own never with the house's key",
         "the house's with its own key"],
)  # fmt: skip
def test_a_job_uses_its_own_storage_or_the_clusters_default(
    values: dict[str, Any], overrides: tuple[str, ...], found: tuple[str, str | None]
) -> None:
    assert storage_of(read_job(QUICKSTART, overrides), read_cluster({**VALUES, **values})) == found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "spec.storage.uri: is required, since this cluster has no default"),
        (("storage={uri: /tmp/runs}",), "spec.storage.uri: '/tmp/runs' is a place on one machine"),
        (("storage={uri: 'file:///tmp/runs'}",), "spec.storage.uri: 'file:///tmp/runs' is a place on one machine"),
    ],
)
def test_storage_on_one_machine_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        storage_of(read_job(QUICKSTART, overrides), read_cluster(VALUES))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": {}}, "images.engine: Field required"),
        ({"image": "x"}, "image: Extra inputs"),
        ({"accelerators": {"nvidia": {"count": 1}}}, "accelerators.nvidia: count: Extra inputs"),
        ({"networkPolicies": "maybe"}, "networkPolicies: Input should be a valid boolean"),
        ({"resources": {"gpu": {}}}, "resources.gpu"),
        ({"storage": {"url": "s3://x"}}, "storage.url: Extra inputs"),
    ],
)
def test_invalid_values_are_reported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_cluster({**VALUES, **changes})
