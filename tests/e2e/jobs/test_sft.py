"""An SFTJob on a real Kubernetes, from `kubectl apply` to a job of its name that starts from its adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import CommandFailed, eventually
from tests.e2e.installation import Installation, condition, is_true, small, stored

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, SFT_JOB, PODS = "warm-up", "sftjobs.kestrl.dev", "kestrl.dev/sft-job=warm-up"
ADAPTER = {"rank": 8, "alpha": 16, "targets": "all-linear"}
STEPS = 40


def sft_job(**spec: Any) -> dict[str, Any]:
    plain = {
        "model": {"base": "demo://tiny", "adapter": ADAPTER},
        "data": {"train": {"uri": "demo://email/transcripts", "size": 64}},
        "training": {"maxSteps": STEPS, "epochs": STEPS, "batchSize": 16, "checkpointEvery": 1},
        "learner": {"threads": 1},
    }
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": NAME},
        "spec": {**plain, **spec},
    }


@contextmanager
def sft_place(installation: Installation) -> Iterator[str]:
    """A namespace for jobs of both kinds."""
    with installation.place("sft") as namespace:
        try:
            yield namespace
        finally:
            installation.cluster.kubectl("delete", SFT_JOB, "--all", f"--namespace={namespace}", "--wait=true")


def logs(cluster: Cluster, namespace: str) -> str:
    """Output of the program in all of its pods."""
    names = [item["metadata"]["name"] for item in cluster.list("pods", namespace, PODS)]
    written = []
    for name in names:
        try:
            written.append(cluster.logs(name, namespace, container="sft"))
        except CommandFailed:  # it has not started, or is gone
            continue
    return "\n".join(written)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_sftjob_resumes_after_its_pod_and_a_namesake_starts_from_it(installation: Installation) -> None:
    cluster = installation.cluster
    with sft_place(installation) as namespace:
        with pytest.raises(CommandFailed, match="give either uri or episodes"):
            cluster.apply(sft_job(data={"train": {"size": 3}}), namespace)
        cluster.apply(sft_job(), namespace)
        eventually("it trains", lambda: "step 3 of" in logs(cluster, namespace), 240)
        with pytest.raises(CommandFailed, match="the spec cannot change under a job"):
            cluster.patch(SFT_JOB, NAME, {"spec": {"training": {"maxSteps": 2}}}, namespace)
        first = cluster.list("pods", namespace, PODS)[0]["metadata"]["name"]
        cluster.delete("pod", first, namespace)
        eventually("another pod goes on", lambda: "resumed at step" in logs(cluster, namespace), 240)

        done = cluster.wait_for(SFT_JOB, NAME, is_true("Succeeded"), namespace, seconds=400)
        status = done["status"]
        assert status["shown"]["phase"] == "Succeeded"
        assert {item["observedGeneration"] for item in status["conditions"]} == {1}
        assert status["result"]["uri"] == condition(done, "Succeeded")[2]
        assert "/adapters/000040-" in status["result"]["uri"]
        assert status.get("restarts", 0) == 0, "a pod that was deleted did not fail"
        assert any("/adapters/000040-" in path for path in stored(installation, NAME))

        adapter = {**ADAPTER, "from": status["result"]["uri"]}
        cluster.apply(small(NAME, model__adapter=adapter, schedule__maxSteps=1), namespace)
        installation.wait(NAME, namespace, is_true("Succeeded"), 400)
        assert cluster.get(SFT_JOB, NAME, namespace)["status"] == status, "the job of its name changes nothing"
        cluster.delete(SFT_JOB, NAME, namespace)
        eventually("its pods are gone", lambda: not cluster.list("pods", namespace, PODS), 240)
        assert cluster.exists("agentrljobs.kestrl.dev", NAME, namespace)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_inputs_that_do_not_exist_become_conditions_with_the_field(installation: Installation) -> None:
    cluster = installation.cluster
    with sft_place(installation) as namespace:
        cluster.apply(sft_job(data={"train": {"uri": "data.jsonl"}}), namespace)
        found = cluster.wait_for(
            SFT_JOB, NAME, lambda job: condition(job, "Accepted")[0] == "False", namespace, seconds=120
        )
        status, reason, message = condition(found, "Accepted")
        assert (status, reason) == ("False", "Invalid")
        assert "spec.data.train.uri: 'data.jsonl' is a local path" in message
