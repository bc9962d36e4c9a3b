"""A job's life as the API shows it: objects applied, written, restored and forgotten by the real operator."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl_operator.controllers import reconcile

from .stage import CHILDREN, JOB, NAMESPACE, UNSEEN, WORKLOADS, Object, Stage, ready

ROLES = ("inference", "tools", "judge", "rollout", "learner")


async def test_a_job_becomes_its_objects_and_the_learner_is_made_last(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    there = stage.children()
    for role in ROLES:
        workload = "StatefulSet" if role in {"inference", "learner"} else "Deployment"
        assert {f"{kind}/{JOB}-{role}" for kind in (workload, "Service", "NetworkPolicy")} <= set(there)
    assert {"Secret", "ConfigMap", "ServiceAccount", "PodDisruptionBudget"} <= {
        item.partition("/")[0] for item in there
    }
    # Those that are not watched are created empty first: whatever has such a name is not taken over.
    made = [
        item for item in stage.cluster.writes() if item.resource in {*CHILDREN, *WORKLOADS} and item.verb == "patch"
    ]
    assert len(made) == len(there), "written more than once"
    assert not {item.resource for item in made[:-5]} & {*WORKLOADS}, "a workload is made before what its pods need"
    assert (made[-1].resource, made[-1].name) == ("statefulsets", f"{JOB}-learner")


async def test_every_object_is_owned_by_the_job_and_deleted_with_it(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    running = await stage.operator()
    uid = stage.job()["metadata"]["uid"]
    await stage.applied()
    await stage.until(lambda: stage.pods("learner"), "the learner has a pod")
    for plural in (*CHILDREN, *WORKLOADS):
        for item in stage.cluster.list(plural, NAMESPACE):
            assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [uid]
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    assert stage.children() == []
    assert stage.cluster.list("pods") == []
    await stage.until(lambda: not running.jobs(), "the job is forgotten")
    written = len(stage.writes())
    await stage.settled()
    assert stage.children() == []
    assert len(stage.writes()) == written


async def test_a_recreated_job_takes_nothing_of_the_old_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "LEFTOVER_SECONDS", 0.3)
    await stage.operator()
    old = stage.job()["metadata"]["uid"]
    await stage.applied()
    await stage.settled()
    stage.cluster.objects.collecting = False  # the garbage collector is delayed
    before = {item["metadata"]["uid"] for plural in WORKLOADS for item in stage.cluster.list(plural)}
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    new = stage.job()["metadata"]["uid"]
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "what it waits for is reported")
    assert f"StatefulSet {JOB}-learner" in stage.condition("Accepted")[2]
    assert {owner(item) for plural in WORKLOADS for item in stage.cluster.list(plural)} == {old}, "taken over"
    stage.cluster.objects.collecting = True
    stage.cluster.objects.collect_orphans()
    await stage.until(lambda: stage.condition("Accepted")[1] == "Valid", "it is taken")
    await stage.until(stage.learner, "it is applied")
    after = [item for plural in WORKLOADS for item in stage.cluster.list(plural)]
    assert {owner(item) for item in after} == {new}
    assert before.isdisjoint(item["metadata"]["uid"] for item in after)


async def test_orphaned_objects_of_a_deleted_job_are_adopted_by_the_next(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    before = stage.children()
    jobs = stage.cluster.objects.resource("agentrljobs")
    stage.cluster.objects.delete(jobs, NAMESPACE, JOB, orphan=True)  # kubectl delete --cascade=orphan
    assert stage.children() == before
    new = stage.job()["metadata"]["uid"]
    await stage.applied()
    await stage.until(lambda: {owner(item) for item in stage.cluster.list("statefulsets")} == {new}, "it is taken")


def owner(item: Object) -> str:
    return item["metadata"]["ownerReferences"][0]["uid"]


async def test_the_status_is_written_when_it_changes_and_not_otherwise(stage: Stage) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.settled()
    seen = []
    stage.cluster.objects.listeners.append(
        lambda change: seen.append(change.after["status"]) if change.resource.plural == "agentrljobs" else None
    )
    for pod in stage.cluster.list("pods"):
        controllers.run(pod)
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    await stage.settled()
    statuses = len(stage.cluster.requests("patch", "agentrljobs/status"))
    for earlier, later in pairwise(seen):
        assert earlier != later
    assert 1 <= len(seen) <= 6
    # A change of a pod that is irrelevant to the job.
    stage.cluster.edit("pods", NAMESPACE, f"{JOB}-inference-0", {"metadata": {"annotations": {"a": "b"}}})
    await stage.settled()
    assert len(stage.cluster.requests("patch", "agentrljobs/status")) == statuses


async def test_the_status_names_the_generation_that_it_was_observed_for(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    assert stage.status()["observedGeneration"] == 1
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 3}}})
    await stage.until(lambda: stage.status()["observedGeneration"] == 2, "the new generation is observed")
    assert stage.cluster.get("deployments", NAMESPACE, f"{JOB}-rollout")["spec"]["replicas"] == 3
    assert {item["observedGeneration"] for item in stage.status()["conditions"] if item["status"] != "Unknown"} == {2}


async def test_the_phase_follows_the_pods(stage: Stage) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.phase() == "Pending", "pods wait")
    await stage.until(lambda: stage.pods("inference"), "there are engines")
    controllers.unschedulable(stage.pods("inference")[0], "0/3 nodes are available: 3 Insufficient cpu.")
    await stage.until(
        lambda: "Insufficient cpu" in stage.condition("Scheduled")[2], "the scheduler's message is reported"
    )
    controllers.image_missing(stage.pods("inference")[1], "no such image")
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "the image is reported")
    assert "ImagePullBackOff: no such image" in stage.condition("EnginesReady")[2]
    for pod in stage.cluster.list("pods"):
        controllers.run(pod)
    await stage.until(lambda: stage.condition("EnginesReady") == ("True", "AllReady", "2/2"), "engines run")
    await stage.until(lambda: stage.phase() == "Starting", "pods run")


async def test_a_missing_input_of_a_pod_is_reported_as_unresolvable(stage: Stage) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.pods("learner"), "there is a learner")
    words = "loading\nerror: spec.data.train.uri: s3://bucket/none is not there; put it there or name another"
    controllers.init_failed(stage.pods("learner")[0], words)
    await stage.until(lambda: stage.condition("Accepted")[1] == "Unresolvable", "it is reported")
    assert "spec.data.train.uri: s3://bucket/none is not there" in stage.condition("Accepted")[2]


async def test_a_deleted_child_is_created_again(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    for plural, name in (
        ("deployments", f"{JOB}-rollout"),
        ("statefulsets", f"{JOB}-inference"),
        ("statefulsets", f"{JOB}-learner"),
        ("services", f"{JOB}-learner"),
        ("networkpolicies", f"{JOB}-tools"),
    ):
        old = stage.cluster.get(plural, NAMESPACE, name)["metadata"]["uid"]
        stage.cluster.delete(plural, NAMESPACE, name)
        new = await stage.until(partial(stage.cluster.find, plural, NAMESPACE, name), f"{plural} {name} is back")
        assert new["metadata"]["uid"] != old
        await stage.settled()


async def test_a_child_scaled_by_another_manager_is_restored_once(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.settled()
    before = len(stage.writes())
    name = f"{JOB}-rollout"
    changes = {"spec": {"replicas": 5}}
    stage.cluster.edit("deployments", NAMESPACE, name, changes, manager="kubectl", subresource="scale")

    def replicas() -> int:
        return stage.cluster.get("deployments", NAMESPACE, name)["spec"]["replicas"]

    assert replicas() == 5
    await stage.until(lambda: replicas() == 1, "it is scaled back")
    await stage.settled()
    again = [item for item in stage.writes()[before:] if item.endswith(f"deployments/{name}")]
    assert len(again) == 1, "answered more than once"


async def test_changes_by_kubernetes_controllers_are_ignored(stage: Stage) -> None:
    Controllers(stage.cluster)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.settled()
    before = [item for item in stage.writes() if "agentrljobs" not in item]
    annotation = {"metadata": {"annotations": {"deployment.kubernetes.io/revision": "1"}}}
    stage.cluster.edit("deployments", NAMESPACE, f"{JOB}-tools", annotation, manager="kube-controller-manager")
    status = {"status": {"readyReplicas": 1, "availableReplicas": 1}}
    stage.cluster.edit(
        "deployments", NAMESPACE, f"{JOB}-tools", status, manager="kube-controller-manager", subresource="status"
    )
    await stage.settled()
    assert [item for item in stage.writes() if "agentrljobs" not in item] == before


async def test_nothing_is_ever_put_on_the_job_but_its_status(stage: Stage) -> None:
    await stage.operator()
    made = stage.job()
    await stage.applied()
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
    await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")
    now = stage.cluster.get("agentrljobs", NAMESPACE, JOB)
    assert set(now["metadata"]) == set(made["metadata"])
    assert "annotations" not in now["metadata"]
    assert "finalizers" not in now["metadata"]
    written = {item.resource for item in stage.cluster.writes() if item.resource.startswith("agentrljobs")}
    assert written == {"agentrljobs/status"}
    managers = {(item["manager"], item.get("subresource", "")) for item in now["metadata"]["managedFields"]}
    assert managers == {("kubectl", ""), ("kestrl-operator", "status")}


async def test_an_operator_of_some_namespaces_leaves_the_others_alone(stage: Stage) -> None:
    await stage.operator(namespaces=("team-b", "team-c"))
    stage.job("elsewhere")
    stage.job("here", namespace="team-b")
    await stage.until(lambda: stage.cluster.find("statefulsets", "team-b", "here-learner"), "team-b's job is applied")
    stage.job("here", namespace="team-c")
    await stage.until(lambda: stage.cluster.find("statefulsets", "team-c", "here-learner"), "team-c's job is applied")
    assert stage.children("elsewhere") == []
    assert stage.status("elsewhere") == UNSEEN
    asked = {
        item.namespace for item in stage.cluster.log if item.verb in {"list", "watch"} and item.resource != "nodes"
    }
    assert asked == {"team-b", "team-c"}


async def test_a_new_process_writes_nothing_if_nothing_has_changed(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    first = await stage.operator("a")
    stage.job()
    stage.job("other", suspend=True)
    await stage.applied()
    await stage.applied("other")
    await stage.settled()
    await stage.stop(first)
    before = len(stage.writes())
    await stage.operator("b")
    await stage.settled()
    assert stage.writes()[before:] == []


async def test_changes_made_while_no_operator_ran_are_reconciled(stage: Stage) -> None:
    first = await stage.operator("a")
    stage.job()
    stage.job("deleted")
    await stage.applied()
    await stage.applied("deleted")
    await stage.stop(first)
    before = stage.children()
    stage.cluster.delete("agentrljobs", NAMESPACE, "deleted")
    stage.cluster.delete("deployments", NAMESPACE, f"{JOB}-tools")
    stage.cluster.delete("services", NAMESPACE, f"{JOB}-rollout")
    stage.cluster.delete("networkpolicies", NAMESPACE, f"{JOB}-learner")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 2}}})
    stage.job("new")
    await stage.operator("b")
    await stage.applied("new")
    await stage.until(lambda: stage.children() == before, "all is there again")
    assert stage.cluster.get("deployments", NAMESPACE, f"{JOB}-rollout")["spec"]["replicas"] == 2
    assert stage.children("deleted") == []


async def test_a_run_keeps_its_storage_when_the_default_changes(stage: Stage) -> None:
    before = {"storage": {"uri": "s3://first/runs"}, "learnerState": {"size": "1Gi", "storageClass": "slow"}}
    after = {"storage": {"uri": "s3://second/runs"}, "learnerState": {"size": "7Gi", "storageClass": "fast"}}

    def learner(name: str = JOB) -> tuple[str, str, str]:
        found = stage.learner(name)
        assert found is not None
        claim = found["spec"]["volumeClaimTemplates"][0]["spec"]
        return (
            found["metadata"]["annotations"]["kestrl.dev/storage"],
            claim["resources"]["requests"]["storage"],
            claim["storageClassName"],
        )

    running = await stage.operator("a", values=before)
    stage.job()
    await stage.applied()
    await stage.settled()
    await stage.stop(running)
    await stage.operator("b", values=after)
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 2}}})
    workers = ("deployments", NAMESPACE, f"{JOB}-rollout")
    await stage.until(lambda: stage.cluster.get(*workers)["spec"]["replicas"] == 2, "the job is rendered again")
    stage.job("new")
    await stage.applied("new")
    await stage.settled()
    assert learner() == ("s3://first/runs", "1Gi", "slow")
    assert stage.condition("Accepted")[:2] == ("True", "Valid")
    assert learner("new") == ("s3://second/runs", "7Gi", "fast")


async def test_pods_of_ranks_are_scaled_with_the_learners_replicas(stage: Stage) -> None:
    """To 0 as well, where nothing is rendered for them any more."""
    await stage.operator()
    stage.job(learner={"replicas": 3})
    await stage.applied()

    def ranks() -> int:
        return stage.cluster.get("statefulsets", NAMESPACE, f"{JOB}-ranks")["spec"]["replicas"]

    assert ranks() == 2
    for replicas in (2, 1, 4):
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"learner": {"replicas": replicas}}})
        await stage.until(lambda wanted=replicas - 1: ranks() == wanted, f"{replicas} replicas")
    await stage.settled()
    assert ranks() == 3
