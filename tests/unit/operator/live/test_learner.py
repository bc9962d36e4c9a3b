"""Reports of learners, over real gRPC: how they reach the status, and the operator's reactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl._shared.backoff import Backoff
from kestrl.api.common.v1 import common_pb2
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode.codec import failure_to_proto
from kestrl.errors import Boundary, Failure
from kestrl_operator.controllers import learner_stream, status_writer
from kestrl_operator.status import failures

from .stage import JOB, NAMESPACE, FakeLearner, Object, Running, Stage, learner_token, learning, ready, report, version


class Scene:
    """A running job with a learner that reports."""

    def __init__(self, stage: Stage, learner: FakeLearner, controllers: Controllers, running: Running) -> None:
        self.stage, self.learner, self.controllers, self.running = stage, learner, controllers, running

    def attempts(self) -> int:
        learner = self.stage.learner()
        assert learner is not None
        return int(learner["metadata"]["annotations"]["kestrl.dev/attempts"])

    def followed(self) -> set[str]:
        """Uids of the learner's pods that have reported to the operator."""
        streams = self.running.operator._states._streams()
        return {stream.pod for stream in streams if stream.report is not None}

    def replicas(self) -> set[int]:
        """The replica counts of all workloads."""
        workloads = [*self.stage.cluster.list("statefulsets"), *self.stage.cluster.list("deployments")]
        return {item["spec"]["replicas"] for item in workloads}


@asynccontextmanager
async def scene(
    stage: Stage,
    first: pb.WatchProgressResponse,
    spec: Mapping[str, Any] | None = None,
    *,
    token: str = "",
) -> AsyncGenerator[Scene]:
    uid = stage.job(**(spec or {}))["metadata"]["uid"]
    async with learning(stage, token or learner_token(uid), first) as learner:

        def started(controllers: Controllers, pod: Object) -> None:
            ready(controllers, pod)
            if pod["metadata"]["labels"]["kestrl.dev/role"] == "learner":
                controllers.run(pod, address=learner.address)

        controllers = Controllers(stage.cluster, started=started)
        running = await stage.operator()
        await stage.applied()
        yield Scene(stage, learner, controllers, running)


async def test_states_are_written_at_once_and_numbers_wait(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "NUMBERS_SECONDS", 600.0)
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        await stage.settled()
        before = len(stage.cluster.requests("patch", "agentrljobs/status"))
        for step in range(10, 14):
            running.learner.report(report("training", step))
            await stage.settled()
        assert stage.status()["progress"]["step"] == 9
        assert len(stage.cluster.requests("patch", "agentrljobs/status")) == before
        running.learner.report(report("training", 14, storage_wait="no answer since 21:03:10Z"))
        await stage.until(lambda: stage.condition("LearnerProgressing")[1] == "StorageUnavailable", "at once")
        assert stage.status()["progress"]["step"] == 14, "numbers go along"
        assert len(stage.cluster.requests("patch", "agentrljobs/status")) == before + 1


async def test_what_the_operator_writes_causes_no_other_pass(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "NUMBERS_SECONDS", 0.0)
    async with scene(stage, report("training", 9)) as on:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        await stage.settled()
        passes = on.running.operator._workers.passes["ok"]
        for step in range(10, 13):
            on.learner.report(report("training", step))
            await stage.until(lambda step=step: stage.status()["progress"]["step"] == step, "it is written")
            await stage.settled()
        assert on.running.operator._workers.passes["ok"] == passes + 3


async def test_a_job_trains_on_while_its_mlflow_server_is_away(stage: Stage) -> None:
    server = "http://mlflow.tracking.svc:8080"
    policy = {"rules": [{"reason": "*", "action": "Fail"}]}
    async with scene(stage, report("training", 9), {"telemetry": {"mlflow": {"uri": server}}, "failurePolicy": policy}):
        await stage.until(lambda: stage.condition("Tracked") == ("True", "Sending", f"to {server}"), "it sends")
        (follower,) = stage.pods("mlflow")
        crashed = Controllers(stage.cluster).crashed
        crashed(
            follower,
            f"waiting\nerror: [infrastructure/push_unavailable] MLflow at {server} does not answer",
            restarts=3,
        )
        await stage.until(lambda: stage.condition("Tracked")[1] == "Failing", "it is reported")
        assert f"MLflow at {server} does not answer (restarted 3 times)" in stage.condition("Tracked")[2]
        await stage.settled()
        assert stage.phase() == "Running"
        assert stage.condition("Ready")[:2] == ("True", "Training")
        assert [event["note"] for event in stage.events("Failing")] == [stage.condition("Tracked")[2]]


async def test_the_last_numbers_are_written_without_another_report(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "NUMBERS_SECONDS", 3.0)
    async with scene(stage, report("training", 9)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        running.learner.report(report("training", 10))
        await stage.until(lambda: stage.status()["progress"]["step"] == 10, "they are written when they are due")


async def test_progress_reaches_the_status(stage: Stage) -> None:
    first = report(
        step=14,
        means={"reward": 0.51234, "answer_correct": 0.25},
        episodes_per_second=3.14159,
        eta_seconds=120.0,
        policy_parent=f"{JOB}.13",
        checkpoint_step=10,
        groups_running=4,
        failures={"tool/tool_raised": 3},
    )
    async with scene(stage, first):
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        status = stage.status()
        assert status["progress"] == {
            "step": 14,
            "totalSteps": 26,
            "reward": 0.5123,
            "answerCorrect": 0.25,
            "episodesPerSecond": 3.14,
            "etaSeconds": 120,
            "failures": {"tool/tool_raised": 3},
        }
        assert status["shown"] == {
            "phase": "Running",
            "step": "14/26",
            "policy": "v14",
            "converged": "2/2",
            "lag": 0,
            "reward": "0.51",
            "idle": "",
            "reason": "",
        }
        assert stage.condition("PolicyConverged")[:2] == ("True", "AllProved")
        assert stage.condition("LearnerProgressing")[:2] == ("True", "Stepping")
        assert stage.condition("CheckpointDurable") == ("True", "Confirmed", "step 10")
        assert stage.condition("RewardHealthy")[:2] == ("True", "Scoring")
        assert [engine["state"] for engine in status["engines"]] == ["serving", "serving"]


async def test_counts_lost_in_a_restart_are_gone_from_the_status(stage: Stage) -> None:
    async with scene(stage, report(step=5, failures={"tool/tool_raised": 3})) as on:
        await stage.until(lambda: stage.status().get("progress", {}).get("failures"), "it has counted")
        on.learner.report(report(step=6))
        await stage.until(lambda: stage.status()["progress"]["step"] == 6, "the next step is reported")
        assert not stage.status()["progress"].get("failures")


async def test_the_lineage_has_each_version_that_all_engines_have_verified(stage: Stage) -> None:
    async with scene(stage, report(step=1)) as on:
        await stage.until(lambda: stage.status().get("policy", {}).get("step") == 1, "version 1")
        engines = [
            pb.EngineProgress(name="engine-0", policy=version(2), state=pb.SERVING_STATE_SERVING),
            pb.EngineProgress(
                name="engine-1", policy=version(1), lag=1, state=pb.SERVING_STATE_LOADING, message="it fetches"
            ),
        ]
        on.learner.report(report(step=2, engines=engines, engines_converged=1, policy_parent="one"))
        await stage.until(lambda: stage.condition("PolicyConverged")[1] == "Loading", "one engine is behind")
        assert "1/2" in stage.condition("PolicyConverged")[2]
        assert stage.status()["policy"]["step"] == 1, "named though one engine has not proved it"
        assert stage.status()["shown"]["lag"] == 1
        on.learner.report(report(step=2, policy_parent="one"))
        await stage.until(lambda: stage.status()["policy"]["step"] == 2, "version 2")
        assert [item["step"] for item in stage.status()["history"]] == [2, 1]
        assert stage.status()["policy"]["parent"] == "one"


async def test_reports_of_a_learner_with_another_credential_are_ignored(stage: Stage) -> None:
    async with scene(stage, report(step=14), token="another job's") as on:
        await stage.until(lambda: stage.condition("LearnerProgressing")[1] == "Unavailable", "it does not answer")
        await stage.settled()
        assert stage.condition("LearnerProgressing")[2].startswith("it does not answer: ")
        assert "credential" in stage.condition("LearnerProgressing")[2]
        assert on.learner.watchers == 0
        assert stage.status()["progress"]["step"] == 0
        assert stage.condition("PolicyConverged")[0] == "Unknown"


async def test_a_broken_stream_makes_its_conditions_unknown_until_it_reconnects(stage: Stage) -> None:
    async with scene(stage, report(step=5)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        on.learner.break_streams()
        await stage.until(lambda: stage.condition("PolicyConverged")[0] == "Unknown", "nothing is claimed")
        assert {engine["state"] for engine in stage.status()["engines"]} == {"unknown"}
        assert stage.status()["progress"]["step"] == 5, "what was seen last stays"
        await stage.until(lambda: stage.condition("PolicyConverged")[1] == "AllProved", "it reports again")
        assert on.learner.watchers == 1


async def test_an_operator_bug_is_not_reported_as_an_unreachable_learner(stage: Stage) -> None:
    async with scene(stage, report(step=5)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")

        def bug(*_: Any) -> None:
            raise ZeroDivisionError("no such thing")

        taken = learner_stream.LearnerStream._take
        stage.patch.setattr(learner_stream.LearnerStream, "_take", bug)
        on.learner.report(report(step=6))
        await stage.until(lambda: stage.condition("PolicyConverged")[0] == "Unknown", "nothing is claimed")
        assert "a bug in the operator" in stage.condition("LearnerProgressing")[2]
        assert "ZeroDivisionError: no such thing" in stage.condition("LearnerProgressing")[2]
        stage.patch.setattr(learner_stream.LearnerStream, "_take", taken)
        await stage.until(lambda: stage.status()["progress"]["step"] == 6, "it reports again")


async def test_a_suspension_deletes_pods_only_after_the_checkpoint(stage: Stage) -> None:
    async with scene(stage, report(step=5, checkpoint_step=4)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
        await stage.until(lambda: on.learner.drains, "it is asked to drain")
        on.learner.report(report("draining", step=6))
        await stage.until(lambda: stage.condition("Suspended")[1] == "Draining", "it is reported")
        await stage.settled()
        assert 0 not in on.replicas(), "pods were let go while the learner drains"
        assert stage.phase() == "Suspending"
        on.learner.report(report("suspended", step=6, checkpoint_step=6))
        await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")
        assert on.replicas() == {0}
        assert stage.cluster.list("pods") == []
        await stage.settled()
        written = len(stage.cluster.writes())
        annotation = {"metadata": {"annotations": {"a": "b"}}}
        stage.cluster.edit("deployments", NAMESPACE, f"{JOB}-rollout", annotation, manager="kube-controller-manager")
        await stage.settled()
        assert stage.cluster.writes()[written:] == [], "written again though nothing changed"
        assert "at step 6" in stage.condition("Suspended")[2]
        on.learner.report(report(step=6, checkpoint_step=6))
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": False}})
        await stage.until(lambda: stage.phase() == "Running", "it goes on")


async def test_pods_that_terminate_slowly_are_waited_for(stage: Stage) -> None:
    async with scene(stage, report("suspended", step=6)) as on:
        await stage.until(lambda: len(stage.cluster.list("pods")) == 6, "pods run")
        stage.cluster.objects.keep_deleted_pods = True
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
        await stage.until(lambda: on.replicas() == {0}, "workloads are to have none")
        await stage.until(lambda: stage.condition("Suspended")[2] == "6 pods are terminating", "it is reported")
        assert stage.condition("Suspended")[:2] == ("False", "Draining")
        for pod in stage.cluster.list("pods"):
            on.controllers.gone(pod)
        await stage.until(lambda: stage.condition("Suspended")[:2] == ("True", "Released"), "all are gone")


async def test_a_job_that_succeeds_releases_its_pods_and_is_deleted_after_its_ttl(stage: Stage) -> None:
    async with scene(stage, report(step=25), {"ttlAfterFinished": "2s"}) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        on.learner.report(report("succeeded", step=26))
        await stage.until(lambda: stage.condition("Succeeded")[:2] == ("True", "Completed"), "it is reported")
        assert "s3://bucket/runs/policies/26" in stage.condition("Succeeded")[2]
        assert stage.phase() == "Succeeded"
        assert stage.status()["finishedAt"]
        await stage.until(lambda: on.replicas() == {0}, "no pod is to run")
        await stage.until(lambda: stage.cluster.list("pods") == [], "none does")
        await stage.until(lambda: stage.cluster.find("agentrljobs", NAMESPACE, JOB) is None, "it is deleted")
        assert stage.children() == []


def failed(code: str, boundary: Boundary = Boundary.INFRASTRUCTURE) -> pb.WatchProgressResponse:
    failure = Failure(boundary=boundary, code=code, message="it broke", component="learner-0")
    return report("failed", step=3, failure=failure_to_proto(failure))


async def test_a_failing_learner_is_restarted_until_its_backoff_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "BACKOFF", Backoff(0.3, 300))
    async with scene(stage, report(step=3), {"failurePolicy": {"backoffLimit": 2}}) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        pods = {stage.pods("learner")[0]["metadata"]["uid"]}
        on.learner.report(failed("storage_failed"))
        await stage.until(lambda: stage.condition("LearnerProgressing")[1] == "Failed", "it is reported")
        assert "it broke" in stage.condition("LearnerProgressing")[2]
        assert "restarted in" in stage.condition("LearnerProgressing")[2]
        began = asyncio.get_running_loop().time()
        await stage.until(lambda: on.attempts() == 1, "it is restarted")
        await stage.until(lambda: stage.pods("learner") and pods.isdisjoint(ids(stage)), "in another pod")
        pods |= ids(stage)
        await stage.until(lambda: on.attempts() == 2, "and again")
        assert asyncio.get_running_loop().time() - began > 0.3 + 0.6 - 0.2
        await stage.until(lambda: stage.condition("Succeeded")[1] == "BackoffExceeded", "it is given up")
        assert "backoffLimit is 2" in stage.condition("Succeeded")[2]
        assert stage.phase() == "Failed"
        assert stage.status()["restarts"] == 2
        await stage.until(lambda: on.replicas() == {0}, "no pod is to run")


def ids(stage: Stage) -> set[str]:
    return {pod["metadata"]["uid"] for pod in stage.pods("learner")}


async def test_a_logprob_gap_ends_the_job_at_once(stage: Stage) -> None:
    async with scene(stage, report(step=3)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        on.learner.report(failed("logprob_gap", Boundary.ENGINE))
        await stage.until(lambda: stage.phase() == "Failed", "it is given up")
        assert stage.condition("Succeeded")[1] == "LearnerFailed"
        assert "[engine/logprob_gap] it broke" in stage.condition("Succeeded")[2]
        assert on.attempts() == 0


async def test_a_new_process_waits_for_the_learner_before_it_reports_on_it(stage: Stage) -> None:
    async with scene(stage, report(step=5)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        await stage.settled()
        await stage.stop(on.running)
        before = stage.cluster.get("agentrljobs", NAMESPACE, JOB)
        events = len(stage.events())
        await stage.operator("b")
        await stage.until(lambda: on.learner.watchers, "it reports")
        await stage.settled()
        assert stage.cluster.get("agentrljobs", NAMESPACE, JOB) == before
        assert len(stage.events()) == events


async def test_a_new_process_continues_a_drain_that_another_began(stage: Stage) -> None:
    async with scene(stage, report(step=5)) as on:
        await stage.until(lambda: stage.phase() == "Running", "the job runs")
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
        await stage.until(lambda: on.learner.drains, "it is asked to drain")
        on.learner.report(report("draining", step=6))
        await stage.until(lambda: stage.phase() == "Suspending", "it drains")
        await stage.stop(on.running)
        await stage.operator("b")
        await stage.settled()
        assert 0 not in on.replicas(), "pods were let go while the learner drains"
        on.learner.report(report("suspended", step=6))
        await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")


async def test_an_unreachable_learner_does_not_block_a_suspension(stage: Stage) -> None:
    async with scene(stage, report(step=5), token="another job's"):
        stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
        await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")


async def test_versions_are_named_as_the_learner_names_them(stage: Stage) -> None:
    named = common_pb2.PolicyVersion(job=JOB, step=7, sha256="ab" * 32)
    engines = [
        pb.EngineProgress(name=name, policy=named, state=pb.SERVING_STATE_SERVING) for name in ("engine-0", "engine-1")
    ]
    async with scene(stage, report(step=7, policy=named, engines=engines)):
        await stage.until(lambda: stage.status().get("policy", {}).get("step") == 7, "it is reported")
        assert stage.status()["policy"]["version"] == f"{JOB}.7.{'ab' * 6}"
        assert stage.status()["policy"]["sha256"] == "ab" * 32


async def test_stable_steps_reset_restarts_and_roll_no_pod(stage: Stage) -> None:
    async with scene(stage, report("training", 3)) as running:
        stage.cluster.edit(
            "statefulsets",
            NAMESPACE,
            f"{JOB}-learner",
            {"metadata": {"annotations": {"kestrl.dev/attempts": "2"}}},
            manager="kestrl-operator",
        )
        await stage.until(lambda: stage.status().get("restarts") == 2, "two restarts are remembered")
        await stage.until(
            lambda: stage.pods("learner")[0]["metadata"]["annotations"]["kestrl.dev/attempts"] == "2", "it runs"
        )
        pod = stage.pods("learner")[0]["metadata"]["uid"]
        # Steps are counted from the first one that the new pod reports.
        await stage.until(lambda: pod in running.followed(), "the new pod is followed")
        running.learner.report(report("training", 4))
        await stage.until(lambda: stage.status()["progress"]["step"] == 4, "it reports")
        running.learner.report(report("training", 4 + failures.STABLE_STEPS))

        def forgiven() -> bool:
            learner = stage.learner()
            return learner is not None and learner["metadata"]["annotations"]["kestrl.dev/forgiven"] == "2"

        await stage.until(forgiven, "they are forgiven")
        await stage.settled()
        assert stage.pods("learner")[0]["metadata"]["uid"] == pod
        assert running.attempts() == 2


async def test_a_report_that_is_too_large_does_not_kill_the_operator(stage: Stage) -> None:
    large = report("training", 3, message="x" * (learner_stream.LARGEST_REPORT + 1))
    async with scene(stage, large) as running:
        await stage.until(lambda: stage.condition("LearnerProgressing")[1] == "Unavailable", "it is reported")
        assert "larger than max" in stage.condition("LearnerProgressing")[2]
        running.learner.report(report("training", 4))
        await stage.until(lambda: stage.phase() == "Running", "a report of a usual size is taken again")


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "name": f"{JOB}-learner",
                "uid": "another",
                "controller": True,
            }
        ],
    ],
    ids=["without an owner", "of a former job's workload"],
)
async def test_a_pod_that_only_has_the_labels_is_not_called(stage: Stage, owners: list[Object]) -> None:
    uid = stage.job()["metadata"]["uid"]
    async with learning(stage, learner_token(uid), report("succeeded", 26)) as stranger:
        controllers = Controllers(stage.cluster, started=ready)
        await stage.operator()
        await stage.applied()
        labels = stage.pods("learner")[0]["metadata"]["labels"]
        metadata = {"name": "stranger", "namespace": NAMESPACE, "labels": labels, "ownerReferences": owners}
        pod = stage.cluster.create("pods", {"metadata": metadata, "spec": {"containers": [{"name": "learner"}]}})
        controllers.run(pod, address=stranger.address)
        learner = stage.pods("learner")[0]
        controllers.image_missing(learner, "no such image")
        await stage.until(
            lambda: "no such image" in stage.condition("LearnerProgressing")[2], "its own pod is looked at"
        )
        await stage.settled()
        assert stranger.watchers == 0, "the job's credential was sent to a stranger"
        assert stage.condition("Succeeded")[1] == "Running"


async def test_a_learner_that_waits_for_storage_is_reported_while_it_waits(stage: Stage) -> None:
    async with scene(stage, report("training", 3)) as running:
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        running.learner.report(report("training", 3, storage_wait="s3://b does not answer since 21:03:10Z"))
        await stage.until(lambda: stage.condition("LearnerProgressing")[1] == "StorageUnavailable", "it is reported")
        assert "since 21:03:10Z" in stage.condition("LearnerProgressing")[2]
        await stage.until(lambda: stage.events("StorageUnavailable"), "an event says so")
        running.learner.report(report("training", 4))
        await stage.until(lambda: stage.phase() == "Running", "storage answers again")
        assert stage.status()["restarts"] == 0
