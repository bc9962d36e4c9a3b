"""A spec that the API server refuses: nothing of it is applied, and the job continues with the spec accepted last."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl._shared.backoff import Backoff
from kestrl_operator.controllers import applier, manifests

from .stage import JOB, NAMESPACE, Stage, ready, report
from .test_learner import scene

TYPO = [{"role": "tools", "template": {"spec": {"contaners": [{"name": "tools"}]}}}]
NOT_OURS = [{"role": "tools", "template": {"spec": {"serviceAccountName": "admin"}}}]
DECLARED = "Deployment team-a/email-search-tools"


def edit(stage: Stage, **spec: Any) -> None:
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": spec})


async def until_refused(stage: Stage) -> None:
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is refused")


async def test_nothing_of_a_job_is_applied_if_one_object_is_refused(stage: Stage) -> None:
    await stage.operator()
    stage.job(patches=TYPO, activeDeadline="1h")
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    message = stage.condition("Accepted")[2]
    assert "Kubernetes refuses an object of this job" in message
    assert DECLARED in message
    assert ".spec.template.spec.contaners: field not declared in schema" in message
    await stage.settled()
    assert stage.children() == []
    assert "startedAt" not in stage.status()
    edit(stage, patches=[])
    await stage.applied()
    await stage.until(lambda: stage.condition("Accepted")[:2] == ("True", "Valid"), "it is accepted")


@pytest.mark.parametrize("python", ["bin/python", "~/vllm/bin/python", "python3"])
async def test_an_interpreter_beside_the_manifest_is_refused(stage: Stage, python: str) -> None:
    await stage.operator()
    stage.job(inference={"python": python})
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert f"spec.inference.python: {python} is relative to the manifest" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_turns_on_one_device_are_refused_where_pods_have_devices_of_their_own(stage: Stage) -> None:
    await stage.operator()
    devices: dict[str, Any] = {"accelerator": {"profile": "nvidia"}}
    stage.job(inference={"sharing": "turns", **devices}, learner=devices)
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert stage.condition("Accepted")[:2] == ("False", "Invalid")
    assert "spec.inference.sharing: turns is for one machine: on a cluster" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_an_environment_without_an_image_is_refused_by_its_field(stage: Stage) -> None:
    await stage.operator()
    stage.job(environment={"reasoningGym": {"generator": "chain_sum"}}, tools=[])
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert "spec.environment.image: is required on a cluster" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_a_database_of_one_machine_is_refused_by_its_field(stage: Stage) -> None:
    await stage.operator()
    stage.job(telemetry={"mlflow": {"uri": "sqlite:///mlflow.db"}})
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert (
        "spec.telemetry.mlflow.uri: sqlite:///mlflow.db is a database of one machine" in stage.condition("Accepted")[2]
    )
    assert stage.children() == []


async def test_requirements_that_pods_would_have_to_install_are_refused(stage: Stage) -> None:
    await stage.operator()
    stage.job(tools=[], agent={"run": "mine:agent", "maxTokens": 512, "python": {"requirements": ["openai"]}})
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert "spec.agent.python: pods install nothing" in stage.condition("Accepted")[2]


async def test_a_refused_object_is_retried_without_a_change(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier, "BACKOFF", Backoff(0.2, 120))
    quota = stage.cluster.fail("patch", "services", status=403, message="exceeded quota: services=2")
    await stage.operator()
    stage.job()
    await until_refused(stage)
    assert "exceeded quota" in stage.condition("Accepted")[2]
    await stage.until(lambda: quota.hits > 10, "it is tried again")
    assert not [child for child in stage.children() if child.startswith(("StatefulSet", "Deployment"))], (
        "a pod misses a Service"
    )
    assert "startedAt" not in stage.status()
    quota.end()
    await stage.applied()
    await stage.until(lambda: stage.condition("Accepted")[0] == "True", "it is accepted")


@pytest.mark.parametrize("patches", [TYPO, NOT_OURS], ids=["refused by Kubernetes", "refused by the operator"])
async def test_a_finished_job_ends_whatever_its_newest_spec_is(stage: Stage, patches: list[Any]) -> None:
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        edit(stage, patches=patches)
        await until_refused(stage)
        await stage.until(lambda: stage.condition("Ready")[0] == "True", "it goes on")
        assert stage.phase() == "Running"
        assert "the job continues with the spec accepted last" in stage.condition("Accepted")[2]
        running.learner.report(report("succeeded", 26))
        await stage.until(lambda: stage.phase() == "Succeeded", "it ends")
        await stage.until(lambda: running.replicas() == {0}, "its pods are let go")
        assert stage.condition("EnginesReady")[:2] == ("False", "Released")
        assert stage.condition("Ready")[:2] == ("True", "Completed")


@pytest.mark.parametrize("patches", [TYPO, NOT_OURS], ids=["refused by Kubernetes", "refused by the operator"])
async def test_a_job_is_suspended_whatever_else_its_spec_says(stage: Stage, patches: list[Any]) -> None:
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        edit(stage, patches=patches, suspend=True)
        await stage.until(lambda: running.learner.drains, "it drains")
        running.learner.report(report("suspended", 9))
        await stage.until(lambda: running.replicas() == {0}, "its pods are let go")
        await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")
        assert stage.condition("Accepted")[1] == "Invalid"


async def test_a_deadline_of_a_refused_spec_counts_for_the_next_operator(stage: Stage) -> None:
    """The spec in force is kept with the job's objects, where another process finds it that has seen no other spec."""
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        await stage.stop(running.running)
        past = {"status": {"startedAt": "2026-01-01T00:00:00Z"}}
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, past, subresource="status")
        edit(stage, patches=TYPO, activeDeadline="1h", failurePolicy={"backoffLimit": 1})
        await stage.operator("b")
        await stage.until(lambda: stage.condition("Succeeded")[1] == "DeadlineExceeded", "it ends")
        await stage.until(lambda: running.replicas() == {0}, "its pods are let go")


async def test_objects_are_maintained_while_the_newest_spec_is_refused(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.applied()
    before = stage.cluster.get("deployments", NAMESPACE, f"{JOB}-tools")["spec"]
    edit(stage, patches=TYPO)
    await until_refused(stage)
    await stage.settled()
    stage.cluster.delete("services", NAMESPACE, f"{JOB}-rollout")
    await stage.until(lambda: stage.cluster.find("services", NAMESPACE, f"{JOB}-rollout"), "it is made again")
    assert stage.cluster.get("deployments", NAMESPACE, f"{JOB}-tools")["spec"] == before


async def test_a_late_refusal_does_not_stop_the_other_objects(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota on the number of objects: each passes the dry run, and one is too many."""
    monkeypatch.setattr(applier, "BACKOFF", Backoff(1, 120))
    Controllers(stage.cluster, started=ready)
    quota = stage.cluster.fail(
        "patch", "deployments", name=f"{JOB}-judge", status=403, message="exceeded quota", dry_run=False
    )
    await stage.operator()
    stage.job()
    await until_refused(stage)
    await stage.until(stage.learner, "the learner's StatefulSet is applied")
    assert f"Deployment/{JOB}-judge" not in stage.children()
    assert f"Deployment/{JOB}-tools" in stage.children()
    await stage.until(lambda: "startedAt" in stage.status(), "what runs counts")
    quota.end()
    await stage.until(lambda: f"Deployment/{JOB}-judge" in stage.children(), "it is tried again")
    await stage.until(lambda: stage.condition("Accepted")[0] == "True", "it is accepted")


async def test_pods_are_released_even_if_their_workload_is_refused(stage: Stage) -> None:
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        stage.cluster.fail("patch", "deployments", times=1, status=422, message="no longer valid", dry_run=True)
        stage.cluster.fail("patch", "deployments", times=1, status=422, message="no longer valid", dry_run=False)
        running.learner.report(report("succeeded", 26))
        await stage.until(lambda: running.replicas() == {0}, "its pods are let go")
        await stage.until(lambda: stage.phase() == "Succeeded", "it has ended")


async def test_a_spec_too_large_for_an_annotation_is_refused(stage: Stage) -> None:
    await stage.operator()
    stage.job(tools=[{"name": "search", "use": "m:f", "config": {"text": "x" * manifests.LARGEST_SPEC}}])
    await stage.until(lambda: stage.phase() == "Rejected", "it is refused")
    assert "spec: is 19" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_a_wrong_lifecycle_field_leaves_the_others_in_force(stage: Stage) -> None:
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        edit(stage, activeDeadline="1s", suspend=True)  # no episode can end within a second
        await until_refused(stage)
        await stage.until(lambda: running.learner.drains, "it drains")
