"""The objects of an SFTJob: one pod with what it needs, and no trace of an AgentRLJob of its name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.rendering import VALUES, of_kind
from tests.unit.operator.sft_samples import NAME, UID, sft_rendered

from kestrl._shared.plan.sft import SFTSettings
from kestrl._shared.prepare import PrepareSettings
from kestrl._shared.spec.load import ProblemsError
from kestrl.errors import UserInputError
from kestrl.storage.credentials import FOLDER_VARIABLE
from kestrl_operator.render.network import METADATA
from kestrl_operator.render.volumes import STORAGE_SECRET


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects[-1]["spec"]["template"]["spec"]
    return spec


def settings(objects: list[dict[str, Any]]) -> SFTSettings:
    return SFTSettings.model_validate_json(of_kind(objects, "ConfigMap")["warm-up-sftjob"]["data"]["sft.json"])


def test_a_job_becomes_one_pod_that_trains_and_reports() -> None:
    objects = sft_rendered()
    assert [item["kind"] for item in objects] == ["ConfigMap", "ServiceAccount", "NetworkPolicy", "Job"]
    pod = pod_of(objects)
    (container,), (prepare,) = pod["containers"], pod["initContainers"]
    assert container["image"] == prepare["image"] == "r/learner-cpu:1"
    assert container["command"] == ["catatonit", "--", "python", "-m", "kestrl_learner.sft"]
    assert container["args"][-1] == container["terminationMessagePath"], "the result is the pod's last message"
    assert prepare["envFrom"] == [{"secretRef": {"name": "bucket-key"}}]
    assert "envFrom" not in container
    assert {"name": FOLDER_VARIABLE, "value": STORAGE_SECRET} in container["env"], "it follows a rotation"
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert pod["terminationGracePeriodSeconds"] == 180, "a step and a checkpoint fit in"
    assert {item["name"] for item in container["volumeMounts"]} <= {item["name"] for item in pod["volumes"]}
    assert {"name": "claim-sets", "persistentVolumeClaim": {"claimName": "sets", "readOnly": True}} in pod["volumes"]


def test_the_pod_prepares_what_its_program_reads() -> None:
    objects = sft_rendered(template="s3://data/chat.jinja")
    data = of_kind(objects, "ConfigMap")["warm-up-sftjob"]["data"]
    prepared, found = PrepareSettings.model_validate_json(data["prepare-sft.json"]), settings(objects)
    assert prepared.model == "hf://org/model"
    assert [item.target for item in prepared.data] == [found.train.path, found.validation and found.validation.path]
    assert (prepared.model_target, prepared.template_target) == (found.model, found.template)
    assert (prepared.template, prepared.template_field) == ("s3://data/chat.jinja", "spec.template")
    assert found.storage == "s3://bucket/warm-up-5f000000"


def test_episodes_of_a_run_are_read_from_its_storage() -> None:
    objects = sft_rendered(data={"train": {"episodes": "s3://bucket/search-1", "minReward": 0.9}})
    assert settings(objects).train.episodes == "s3://bucket/search-1"
    prepared = of_kind(objects, "ConfigMap")["warm-up-sftjob"]["data"]["prepare-sft.json"]
    assert PrepareSettings.model_validate_json(prepared).data == ()


def test_the_storage_of_a_begun_run_stays() -> None:
    objects = sft_rendered(begun_in="s3://first")
    assert settings(objects).storage == "s3://first/warm-up-5f000000"
    assert objects[-1]["metadata"]["annotations"] == {"kestrl.dev/storage": "s3://first"}


def test_no_watch_or_policy_of_a_namesake_takes_its_objects() -> None:
    for item in sft_rendered():
        assert "app.kubernetes.io/managed-by" not in item["metadata"]["labels"]
        owner = item["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("SFTJob", NAME, UID)
    labels = sft_rendered()[-1]["spec"]["template"]["metadata"]["labels"]
    assert not labels.keys() & {"kestrl.dev/job", "kestrl.dev/role"}
    names = {item["metadata"]["name"] for item in sft_rendered()}
    assert names == {"warm-up-sft", "warm-up-sftjob"}


def test_its_policy_allows_names_and_storage_and_no_caller() -> None:
    objects = sft_rendered({"egressPorts": [443, 9000]})
    policy = of_kind(objects, "NetworkPolicy")["warm-up-sft"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= objects[-1]["spec"]["template"]["metadata"]["labels"].items()
    assert policy["ingress"] == []
    names, far = policy["egress"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert far["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}]
    assert [port["port"] for port in far["ports"]] == [443, 9000]
    assert "NetworkPolicy" not in {item["kind"] for item in sft_rendered({"networkPolicies": False})}


@pytest.mark.parametrize(
    ("learner", "image", "resource"),
    [
        ({"device": "cuda:0"}, "r/learner-cuda:1", "nvidia.com/gpu"),
        ({"device": "npu"}, "r/learner-npu:1", "huawei.com/Ascend910"),
        ({"device": "npu", "accelerator": {"profile": "ascend-cce"}}, "r/learner-npu:1", "huawei.com/ascend-1980"),
    ],
)
def test_devices_are_requested_by_profile(learner: dict[str, Any], image: str, resource: str) -> None:
    objects = sft_rendered({"resources": {"learner": {"requests": {"cpu": "2"}}}}, learner=learner)
    (container,) = pod_of(objects)["containers"]
    assert container["image"] == image
    assert container["resources"] == {
        "limits": {resource: "1"},
        "requests": {"cpu": "2", "memory": "512Mi", "ephemeral-storage": "2Gi", resource: "1"},
    }
    assert settings(objects).device == learner["device"].partition(":")[0], "the pod sees one device"


def test_a_pod_has_a_device_for_each_of_its_ranks() -> None:
    learner = {"device": "cuda", "accelerator": {"profile": "nvidia", "count": 4}}
    objects = sft_rendered(learner=learner)
    (container,) = pod_of(objects)["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
    found = settings(objects)
    assert (found.ranks, found.ranks_per_pod, found.device) == (4, 4, "cuda")
    assert objects[-1]["spec"].get("parallelism", 1) == 1, "all ranks are in one pod"


def test_what_a_retry_cannot_help_ends_the_job_and_what_stops_it_does_not_count() -> None:
    spec = sft_rendered()[-1]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert rules[1] == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [130, 143]}}
    assert rules[2] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "sft", "operator": "In", "values": [2]},
    }
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (3, "Failed")


@pytest.mark.parametrize(
    ("values", "spec", "text"),
    [
        ({}, {"learner": {"accelerator": {"profile": "abacus"}}}, "spec.learner.accelerator.profile: 'abacus' is not"),
        ({}, {"learner": {"accelerator": {"profile": "nvidia"}}}, "spec.learner.device is 'cpu'; make them the same"),
        (
            {},
            {"learner": {"accelerator": {"profile": "cpu", "count": 2}}, "training": {"parameters": "all"}},
            "spec.learner.accelerator.count: is 2, and spec.training.parameters: all trains on one device",
        ),
        ({"storage": {}}, {}, "spec.storage.uri: is required"),
        (
            {},
            {"storage": {"uri": "file:///tmp/runs"}},
            "spec.storage.uri: 'file:///tmp/runs' is a place on one machine",
        ),
        ({}, {"data": {"train": {}}}, "give either uri or episodes"),
        ({}, {"training": {"epochs": 0}}, "spec.training.epochs"),
    ],
)
def test_what_cannot_run_here_is_refused_by_field(values: dict[str, Any], spec: dict[str, Any], text: str) -> None:
    with pytest.raises(UserInputError) as refused:
        sft_rendered(values, **spec)
    assert text in str(refused.value)


def test_a_device_without_an_image_is_refused() -> None:
    images = {**VALUES["images"], "learner": {"cpu": "r/learner-cpu:1"}}
    with pytest.raises(UserInputError, match=r"no image for 'cuda' \(the chart's jobs.images.learner.cuda\)"):
        sft_rendered({"images": images}, learner={"device": "cuda"})


def test_a_job_of_all_parameters_has_no_adapter() -> None:
    """As an API server stores it, with the defaults of the adapter that is not trained."""
    model = {"base": "hf://org/model", "adapter": {"rank": 8, "alpha": 16.0, "targets": "all-linear"}}
    found = settings(sft_rendered(model=model, training={"parameters": "all"}))
    assert (found.parameters, found.algorithm.learning_rate) == ("all", 2e-5)
    with pytest.raises(ProblemsError, match=r"spec\.model\.adapter\.rank"):
        sft_rendered(model=model | {"adapter": {"rank": 4}}, training={"parameters": "all"})


def test_pod_defaults_are_in_the_pod_of_an_sft_job() -> None:
    defaults = {"labels": {"team": "rl"}, "priorityClassName": "research", "env": [{"name": "NO_PROXY", "value": "x"}]}
    template = sft_rendered({"podDefaults": defaults})[-1]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "rl"
    assert template["spec"]["priorityClassName"] == "research"
    for container in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
        assert {"name": "NO_PROXY", "value": "x"} in container["env"]


def test_the_labels_of_its_queue_are_the_jobs_alone() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "urgent"}
    *others, batch = sft_rendered(labels={**labels, "team": "a"})
    assert batch["metadata"]["labels"].items() >= labels.items()
    assert "team" not in batch["metadata"]["labels"]
    templates = [batch["spec"]["template"], *others]
    assert not any(label in item["metadata"]["labels"] for item in templates for label in labels)
