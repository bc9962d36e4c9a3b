"""The Workload of a job: a pod set for each role, with what decides about quota and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.rendering import NVIDIA, of_kind, rendered
from tests.unit.operator.samples import job

from kestrl._shared.plan.components import Role
from kestrl_operator.render.quota import quota_request, resuming, sft_request, unplaced_form, workload_object
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import QuotaHolder, QuotaRequest
from kestrl_operator.state.jobs import Key

ANY = {"operator": "Exists"}
HOLDER = QuotaHolder(kind="AgentRLJob", key=Key("team-a", "email-search"), uid="u-1")


def asked(*overrides: str, **changes: Any) -> QuotaRequest:
    return quota_request(job(*overrides).spec, rendered(*overrides, **changes), "gpus", "")


def test_there_is_a_pod_set_for_each_role() -> None:
    sets = {item["name"]: item for item in asked(*NVIDIA).pod_sets}
    assert {name: item["count"] for name, item in sets.items()} == {
        "inference": 2, "rollout": 1, "tools": 1, "judge": 1, "learner": 1,
    }  # fmt: skip
    engine = next(item for item in sets["inference"]["template"]["spec"]["containers"] if item["name"] == "engine")
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert set(engine) == {"name", "resources"}


def test_engines_with_a_range_ask_for_the_most() -> None:
    sets = {item["name"]: item["count"] for item in asked("inference.replicas={min: 2, max: 5}").pod_sets}
    assert sets["inference"] == 5


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (("schedule.maxSteps=99",), {}),
        ((), {"attempts": 2}),
        ((), {"parked": True}),
        ((), {"values": {"storage": {"uri": "s3://another"}}}),
    ],
)
def test_what_needs_no_other_quota_changes_no_request(overrides: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert asked(*overrides, **changes) == asked()


def test_the_workload_is_the_jobs() -> None:
    body = workload_object(HOLDER, asked(), None)
    assert (body["apiVersion"], body["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    assert body["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert body["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == "u-1"
    assert "priority" not in body["spec"]


def test_pods_are_placed_where_their_quota_is() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    place = Placement({"pool": "spot"}, [toleration])
    pods = {
        name: item["spec"]["template"]["spec"]
        for name, item in of_kind(rendered(placements={Role.ROLLOUT: place}), "StatefulSet", "Deployment").items()
    }
    assert pods["email-search-rollout"]["nodeSelector"] == {"pool": "spot"}
    assert pods["email-search-rollout"]["tolerations"] == [toleration]
    assert not any("nodeSelector" in spec for name, spec in pods.items() if name != "email-search-rollout")


def test_the_pod_of_an_sftjob_moves_from_place_to_place() -> None:
    """A patch takes away what an earlier place has added, and nothing that the Job or Kubernetes has."""
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"nodeSelector": {"zone": "z"}, "tolerations": [ANY], "containers": []},
    }
    unplaced = unplaced_form(template)
    spot = Placement({"pool": "spot"}, [{"key": "spot"}], {"slot": "7", "team": "b"}, {"request": "r-1"})
    first = resuming(template, unplaced, spot)["spec"]["template"]
    assert first == {
        "metadata": {"labels": {"team": "a", "slot": "7"}, "annotations": {"request": "r-1"}},
        "spec": {"nodeSelector": {"zone": "z", "pool": "spot"}, "tolerations": [ANY, {"key": "spot"}]},
    }
    first["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "warm-up-sft"
    assert resuming(first, unplaced, Placement({"pool": "other"}, []))["spec"] == {
        "suspend": False,
        "template": {
            "metadata": {"labels": {"team": "a", "slot": None}, "annotations": {"request": None}},
            "spec": {"nodeSelector": {"zone": "z", "pool": "other"}, "tolerations": [ANY]},
        },
    }
    assert resuming(first, unplaced, None)["spec"]["template"]["spec"]["nodeSelector"] == {"zone": "z", "pool": None}
    assert sft_request(unplaced, "gpus", "").pod_sets == sft_request(unplaced_form(template), "gpus", "").pod_sets
