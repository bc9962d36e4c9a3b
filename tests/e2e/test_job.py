"""A job on a real cluster, from `helm install` to its adapter in object storage, through all disruptions on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from pyarrow import BufferReader, parquet
from tests.fakes.s3 import SECRET_KEY

from .cluster.client import Cluster, Object
from .cluster.commands import CommandFailed, eventually
from .installation import (
    BUCKET,
    JOB,
    SYSTEM,
    Installation,
    condition,
    credentials,
    is_true,
    newest_adapter,
    quickstart,
    small,
    stored,
    summary,
)
from .test_isolation import reached

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(900)
@pytest.mark.share
def test_a_job_whose_newest_spec_is_refused_is_suspended_resumed_and_ends(installation: Installation) -> None:
    cluster, typo = installation.cluster, [{"role": "tools", "template": {"spec": {"contaners": [{"name": "tools"}]}}}]
    with installation.place() as namespace:

        def edit(**spec: Any) -> None:
            patch = json.dumps({"spec": spec})
            cluster.kubectl("patch", JOB, "typo", "--type=merge", f"--patch={patch}", f"--namespace={namespace}")

        cluster.apply(small("typo", schedule__maxSteps=6), namespace)
        installation.wait_for_adapter("typo", namespace, 1, 300)
        edit(patches=typo)
        refused = installation.wait("typo", namespace, lambda job: condition(job, "Accepted")[0] == "False", 60)
        assert "contaners: field not declared in schema" in condition(refused, "Accepted")[2]
        edit(suspend=True)
        installation.wait("typo", namespace, is_true("Suspended"), 240)
        eventually("its pods are gone", lambda: cluster.list("pods", namespace) == [], 240)
        edit(suspend=False)
        ended = installation.wait("typo", namespace, is_true("Succeeded"), 400)
        assert condition(ended, "Accepted")[0] == "False"
        assert condition(ended, "EnginesReady")[1] == "Released"
        eventually("its pods are gone", lambda: cluster.list("pods", namespace) == [], 240)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rotated_key_of_the_storage_costs_a_running_job_nothing_but_time(installation: Installation) -> None:
    """The old key is denied at once, and the kubelet brings the new one later: nobody is restarted."""
    cluster, store = installation.cluster, installation.store
    with installation.place() as namespace:
        cluster.apply(small("rotated", schedule__maxSteps=5), namespace)
        installation.wait_for_adapter("rotated", namespace, 2, 300)
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}
        try:
            store.rotate("rotated")
            waits = installation.wait(
                "rotated", namespace, lambda job: "access is denied" in json.dumps(job["status"]["conditions"]), 180
            )
            assert condition(waits, "Succeeded")[1] == "Running"
            cluster.apply(credentials(store, namespace, secret="rotated"), namespace)
            done = installation.wait("rotated", namespace, is_true("Succeeded"), 420)
        finally:
            store.rotate(SECRET_KEY)
        assert done["status"]["shown"]["step"] == "5/5"
        assert done["status"].get("restarts", 0) == 0
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", 5)
        assert {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)} <= pods, "no pod was replaced"


def test_objects_of_a_user_with_a_jobs_names_are_left_alone(installation: Installation) -> None:
    """The API server's own answers to the create, to the JSON patch of tests and to the apply with a uid."""
    cluster = installation.cluster
    with installation.place() as namespace:
        name = "taken-agentrljob"
        theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"password": "x"}}
        cluster.apply(theirs, namespace)
        cluster.apply(small("taken", suspend=True), namespace)
        refused = installation.wait("taken", namespace, lambda job: condition(job, "Accepted")[1] == "Invalid", 60)
        assert f"Secret {namespace}/{name} is there and is not this job's" in condition(refused, "Accepted")[2]
        assert condition(refused, "Stalled")[:2] == ("True", "Rejected")
        assert "ownerReferences" not in cluster.get("secret", name, namespace)["metadata"]

        cluster.kubectl("delete", "secret", name, f"--namespace={namespace}")
        installation.wait("taken", namespace, is_true("Suspended"), 240)
        owners = cluster.get("secret", name, namespace)["metadata"]["ownerReferences"]
        assert [owner["name"] for owner in owners] == ["taken"]
        cluster.patch(JOB, "taken", {"spec": {"rollout": {"replicas": 2}}}, namespace)
        cluster.wait_for(JOB, "taken", lambda job: job["status"]["observedGeneration"] == 2, namespace, seconds=60)
        accepted = cluster.get(JOB, "taken", namespace)
        assert condition(accepted, "Accepted")[0] == "True", "its own objects are known by their owner"


@pytest.mark.share(3)
@pytest.mark.timeout(1500)
def test_an_engine_joins_a_job_and_its_learner_goes_on(installation: Installation) -> None:
    """Two engines become a range of which there are three: no pod is replaced, and the third samples for training until
    it leaves again amid a step, which costs no scenario an attempt."""
    cluster = installation.cluster
    with installation.place("engines") as namespace:
        spec = {"data__train__size": 4000, "schedule__maxSteps": 1000, "inference__replicas": 2}
        cluster.apply(small("grows", **spec), namespace)
        installation.wait_for_adapter("grows", namespace, 1, 500)
        pods = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}

        cluster.patch(JOB, "grows", {"spec": {"inference": {"replicas": {"min": 2, "max": 3}}}}, namespace)
        cluster.wait_for(JOB, "grows", lambda job: job["status"]["observedGeneration"] == 2, namespace, seconds=200)
        cluster.kubectl("scale", "statefulset", "grows-inference", "--replicas=3", f"--namespace={namespace}")
        eventually("the third engine samples", lambda: "engine-2" in engines_of_newest_step(installation, "grows"), 500)
        step = newest_adapter(installation, "grows")
        installation.wait_for_adapter("grows", namespace, step + 2, 200)

        assert pods < {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}, "all of before are there"
        learner = cluster.get("pod", "grows-learner-0", namespace)
        assert [item["restartCount"] for item in learner["status"]["containerStatuses"]] == [0]
        installation.wait("grows", namespace, lambda job: len(job["status"].get("engines", ())) == 3, 120)

        leaver = cluster.get("pod", "grows-inference-2", namespace)
        grace = leaver["spec"]["terminationGracePeriodSeconds"]
        assert grace == 90, "the deadline of a turn, and 30 s"
        step = newest_adapter(installation, "grows")
        installation.wait_for_adapter("grows", namespace, step + 1, 200)  # the next step has begun
        with cluster.following("grows-inference-2", namespace, "inference") as log:
            eventually("its agent's log is followed", lambda: b"serves on" in log.read_bytes(), 60)
            cluster.kubectl("scale", "statefulset", "grows-inference", "--replicas=2", f"--namespace={namespace}")
            gone = lambda: not cluster.exists("pod", "grows-inference-2", namespace)  # noqa: E731
            eventually("it has ended before it would be killed", gone, grace)
            eventually("its log ends", lambda: b"0 requests are left" in log.read_bytes(), 30)
            assert b"drains: it takes no further turn" in log.read_bytes()
        step = newest_adapter(installation, "grows")
        installation.wait_for_adapter("grows", namespace, step + 2, 200)
        assert trained_once(installation, "grows")
        installation.wait("grows", namespace, lambda job: len(job["status"].get("engines", ())) == 2, 120)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_engines_evicted_and_lost_amid_a_step_cost_no_scenario(installation: Installation) -> None:
    """As on nodes that are drained, and on spot nodes that go without notice: one of two engines by the eviction API,
    the other by force, then the first by `kubectl drain`. Steps go on without it while its node is cordoned."""
    cluster = installation.cluster
    with installation.place("spot") as namespace:
        spec = {"data__train__size": 4000, "schedule__maxSteps": 1000, "inference__replicas": 2}
        cluster.apply(small("spot", **spec), namespace)
        installation.wait_for_adapter("spot", namespace, 1, 500)

        def lost(pod: str, lose: Callable[[], object]) -> None:
            installation.wait("spot", namespace, lambda job: job["status"]["shown"]["converged"] == "2/2", 300)
            uid, step = cluster.get("pod", pod, namespace)["metadata"]["uid"], newest_adapter(installation, "spot")
            installation.wait_for_adapter("spot", namespace, step + 1, 200)  # the next step has begun
            lose()
            installation.wait_for_adapter("spot", namespace, step + 3, 300)
            eventually("there is another pod", lambda: uid not in uids(installation, namespace), 200)

        def drain_of_both_nodes() -> None:
            evict(installation, "spot-inference-0", namespace)
            with pytest.raises(CommandFailed, match="disruption budget"):
                evict(installation, "spot-inference-1", namespace)

        lost("spot-inference-0", drain_of_both_nodes)
        force = ("--grace-period=0", "--force", f"--namespace={namespace}")
        lost("spot-inference-1", lambda: cluster.kubectl("delete", "pod", "spot-inference-1", *force))
        node = cluster.get("pod", "spot-inference-0", namespace)["spec"]["nodeName"]
        one = "--pod-selector=statefulset.kubernetes.io/pod-name=spot-inference-0"  # the only node has all other pods
        try:
            lost("spot-inference-0", lambda: cluster.kubectl("drain", node, one, "--delete-emptydir-data", seconds=300))
            phase = cluster.get("pod", "spot-inference-0", namespace)["status"]["phase"]
            assert phase == "Pending", "steps went on with the other engine"
        finally:
            cluster.kubectl("uncordon", node)
        installation.wait("spot", namespace, lambda job: job["status"]["shown"]["converged"] == "2/2", 300)
        assert trained_once(installation, "spot")
        assert installation.job("spot", namespace)["status"].get("restarts", 0) == 0


def evict(installation: Installation, pod: str, namespace: str) -> None:
    """Asks for the eviction of a pod, as the drain of its node does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    installation.cluster.kubectl("create", f"--raw={path}", "--filename=-", given=json.dumps(eviction))


def uids(installation: Installation, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in installation.cluster.list("pods", namespace)}


def trained_once(installation: Installation, job: str) -> bool:
    """Whether every stored scenario was trained on once, and no group failed. One that is too old is sampled again."""
    columns = ["step", "scenario", "group", "outcome", "failure_code"]
    tables = [
        parquet.read_table(BufferReader(bytes(obstore.get(installation.bucket, path).bytes())), columns=columns)
        for path in stored(installation, job)
        if "/episodes/train/" in path
    ]
    rows = [row for table in tables for row in table.to_pylist()]
    failed = [row for row in rows if row["failure_code"] or row["outcome"] not in {"trained", "stale"}]
    assert not failed, failed[:5]
    groups = {(row["step"], row["scenario"], row["group"]) for row in rows if row["outcome"] == "trained"}
    return len(groups) == len({scenario for _, scenario, _ in groups}) == 4 * len(tables)


def engines_of_newest_step(installation: Installation, job: str) -> set[str]:
    """Names of the engines that sampled the episodes of the last stored step."""
    steps = [path for path in stored(installation, job) if "/episodes/train/" in path]
    if not steps:
        return set()
    content = bytes(obstore.get(installation.bucket, max(steps)).bytes())
    return set(parquet.read_table(BufferReader(content), columns=["engine"]).column("engine").to_pylist())


def trains(job: dict[str, Any]) -> bool:
    return condition(job, "Ready")[:2] == ("True", "Training")


@pytest.mark.timeout(1200)
def test_a_job_suspends_resumes_and_ends_under_disruptions(installation: Installation) -> None:
    """Scaled, without every one of its pods, the leading operator and the API server in turn, suspended and resumed: it
    succeeds, and trains every step once."""
    cluster = installation.cluster
    with installation.place() as namespace:
        cluster.apply(small("story", schedule__maxSteps=8, rollout__replicas=2), namespace)
        running = installation.wait("story", namespace, is_true("Ready"), 300)
        assert running["status"]["observedGeneration"] == 1
        assert running["status"]["shown"]["phase"] == "Running"
        assert condition(running, "PolicyConverged")[:2] == ("True", "AllProved")

        refused = cluster_refuses(installation, namespace, {"spec": {"algorithm": {"learningRate": 0.5}}})
        assert "algorithm cannot change under a job" in refused

        cluster.kubectl("scale", JOB, "story", "--replicas=3", f"--namespace={namespace}")
        cluster.wait_for(
            "deployment",
            "story-rollout",
            lambda found: found["status"].get("readyReplicas") == 3,
            namespace,
            seconds=120,
        )
        cluster.kubectl("scale", JOB, "story", "--replicas=1", f"--namespace={namespace}")

        installation.wait_for_adapter("story", namespace, 1, 180)
        for role in ("tools", "judge", "rollout", "inference"):
            cluster.kubectl(
                "delete", "pod", f"--namespace={namespace}", f"--selector=kestrl.dev/role={role}", "--wait=false"
            )
        leader = installation.leader()
        cluster.kubectl("delete", "pod", leader, f"--namespace={SYSTEM}", "--grace-period=0", "--force")
        eventually("another operator leads", lambda: installation.leader() not in {"", leader}, 120)

        installation.wait_for_adapter("story", namespace, 3, 300)
        cluster.patch(JOB, "story", {"spec": {"suspend": True}}, namespace)
        suspended = installation.wait("story", namespace, is_true("Suspended"), 240)
        step = suspended["status"]["progress"]["step"]
        assert condition(suspended, "CheckpointDurable") == ("True", "Confirmed", f"step {step}")
        over = {"Succeeded", "Failed"}  # a pod whose programs have ended may exist for a moment longer
        assert {pod["status"]["phase"] for pod in cluster.list("pods", namespace)} <= over
        assert condition(suspended, "PolicyConverged")[0] == "Unknown", "no engine serves a policy now"

        cluster.patch(JOB, "story", {"spec": {"suspend": False}}, namespace)
        resumed = installation.wait("story", namespace, trains, 300)  # Ready is true of a suspended job, too
        assert resumed["status"]["progress"]["step"] >= step, "it goes on from where it stopped"
        cluster.kubectl("delete", "pod", "story-learner-0", f"--namespace={namespace}", "--grace-period=0", "--force")
        if cluster.own is not None:
            cluster.node.restart("kube-apiserver")

        done = installation.wait("story", namespace, is_true("Succeeded"), 420)
        assert done["status"]["shown"]["step"] == "8/8"
        assert done["status"]["finishedAt"]
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", 8)
        assert done["status"]["result"] == report["policy"]
        versions = [item["step"] for item in done["status"]["history"]]
        assert versions == sorted(versions, reverse=True), "the lineage is in order"
        adapters = [
            path for path in stored(installation, "story") if path.endswith("manifest.json") and "/adapters/" in path
        ]
        assert any("/000008-" in path for path in adapters), f"the last adapter is in {BUCKET}"
        eventually("an ended job's pods are released", lambda: not cluster.list("pods", namespace), 120)


def cluster_refuses(installation: Installation, namespace: str, change: dict[str, Any]) -> str:
    """kubectl's message for a change that is not allowed."""
    with pytest.raises(CommandFailed) as refused:
        installation.cluster.patch(JOB, "story", change, namespace)
    return str(refused.value)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_quickstart_trains_on_a_cluster_as_it_does_on_one_machine(installation: Installation) -> None:
    """With the same file as `kestrl run`: two engines, two workers; the reward rises and the adapter is stored."""
    with installation.place() as namespace:
        installation.cluster.apply(quickstart(rollout__replicas=2), namespace)
        done = installation.wait("email-search", namespace, is_true("Succeeded"), 1500)
        report = summary(installation, done)
        assert report["after"]["reward"] > report["before"]["reward"] + 0.2
        assert report["failures"] == {}
        reasons = {
            event["reason"]
            for event in installation.cluster.list("events.events.k8s.io", namespace)
            if event["regarding"]["kind"] == "AgentRLJob"
        }
        assert {"PodsScheduled", "AllReady", "Completed"} <= reasons


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_deleted_while_it_runs_leaves_its_adapters_and_nothing_else(installation: Installation) -> None:
    cluster = installation.cluster
    with installation.place() as namespace:
        cluster.apply(small("deleted", schedule__maxSteps=100), namespace)
        installation.wait_for_adapter("deleted", namespace, 1, 240)
        cluster.delete(JOB, "deleted", namespace)
        kinds = "statefulsets,deployments,services,networkpolicies,poddisruptionbudgets,pods,persistentvolumeclaims"
        eventually(
            "Kubernetes has deleted what the job owned",
            lambda: not json.loads(cluster.kubectl("get", kinds, f"--namespace={namespace}", "-o", "json"))["items"],
            240,
        )
        assert any("/adapters/000001-" in path for path in stored(installation, "deleted"))


ONE_STEP: dict[str, Any] = {
    "tools": None,
    "algorithm__groupsPerStep": 2,
    "schedule__maxSteps": 1,
    "rollout__concurrency": 8,
}


def in_user_code(cluster: Cluster, role: str, container: str) -> list[Object]:
    """A patch for a container with a user's image, whose working directory then has `user_images`."""
    folder = str(cluster.node.layout.checkout / "tests" / "fakes")
    return [{"role": role, "template": {"spec": {"containers": [{"name": container, "workingDir": folder}]}}}]


@pytest.mark.timeout(600)
@pytest.mark.share
def test_an_agent_runs_in_pods_of_its_image(installation: Installation, network_policies: Cluster) -> None:
    """Its pods reach the gateway alone, and all episodes are theirs."""
    cluster = network_policies
    agent = {"run": "user_images:agent", "image": cluster.image, "replicas": 2, "maxTokens": 64, "stoppedReward": 0}
    with installation.place() as namespace:
        patches = in_user_code(cluster, "agent", "agent")
        # Rows of the mail example name a loop.
        rows = [{"id": f"row-{number}", "prompt": f"Write about {number}."} for number in range(8)]
        obstore.put(installation.bucket, "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        job = small(
            "own-agent",
            data__train={"uri": f"s3://{BUCKET}/rows.jsonl"},
            agent=agent,
            rewards=[{"rule": "loop_reward"}],
            patches=patches,
            **ONE_STEP,
        )
        cluster.apply(job, namespace)
        cluster.wait_for(
            "deployment",
            "own-agent-agent",
            lambda found: found["status"].get("readyReplicas", 0) == 2,
            namespace,
            seconds=200,
        )
        judge = cluster.list("pods", namespace, "kestrl.dev/role=judge")[0]["status"]["podIP"]
        assert reached(cluster, namespace, "agent", f"{judge}:7000") == [False]
        ended = installation.wait("own-agent", namespace, is_true("Succeeded"), 300)
        report = summary(installation, ended)
        assert (report["status"], report["steps"], report["failures"]) == ("succeeded", 1, {})


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_environment_plays_in_a_container_of_its_image(installation: Installation) -> None:
    cluster = installation.cluster
    environment = {"adapter": {"use": "user_images:Letters"}, "image": cluster.image}
    with installation.place() as namespace:
        patches = in_user_code(cluster, "tools", "environment")
        agent, rewards = {"maxTurns": 1, "maxTokens": 16}, [{"rule": "environment_reward"}]
        job = small("own-env", agent=agent, environment=environment, rewards=rewards, patches=patches, **ONE_STEP)
        cluster.apply(job, namespace)
        ended = installation.wait("own-env", namespace, is_true("Succeeded"), 300)
        report = summary(installation, ended)
        assert (report["status"], report["steps"], report["failures"]) == ("succeeded", 1, {})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_on_ranks_of_two_pods_loses_one_and_trains_on(installation: Installation) -> None:
    """The deleted pod's successor and the restarted learner form another gang, from the checkpoint."""
    cluster, name, steps = installation.cluster, "ranks", 4
    with installation.place("ranks") as namespace:
        cluster.apply(small(name, schedule__maxSteps=steps, learner={"replicas": 2, "threads": 1}), namespace)
        installation.wait_for_adapter(name, namespace, 1, 400)
        lost = cluster.get("pod", f"{name}-ranks-0", namespace)["metadata"]["uid"]
        cluster.kubectl("delete", "pod", f"{name}-ranks-0", f"--namespace={namespace}", "--grace-period=0", "--force")

        def restarts() -> int:
            learner = cluster.get("pod", f"{name}-learner-0", namespace)
            return sum(item["restartCount"] for item in learner["status"].get("containerStatuses", ()))

        eventually("the learner starts again", lambda: restarts() == 1, 180)
        assert cluster.get("pod", f"{name}-ranks-0", namespace)["metadata"]["uid"] != lost
        done = installation.wait(name, namespace, is_true("Succeeded"), 400)
        report = summary(installation, done)
        assert (report["status"], report["steps"]) == ("succeeded", steps)
        assert report["logprob_gap"]["worst"] <= 1e-3
        assert condition(done, "CheckpointDurable")[2] == f"step {steps}"
        eventually("its pods are released", lambda: not cluster.list("pods", namespace), 120)
