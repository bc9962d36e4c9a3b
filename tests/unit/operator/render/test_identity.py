"""A job's pods under a ServiceAccount with a cloud identity, as the clouds' own documentation has them: which pods run
as it, what the webhooks add to them, and which metadata services they reach."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit.operator.rendering import VALUES, of_kind, rendered
from tests.unit.operator.samples import NAMESPACE, job
from tests.unit.operator.sft_samples import sft_rendered

from kestrl._shared.plan.servers import METADATA
from kestrl.errors import UserInputError
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.chart_values import ServiceAccount, read_cluster
from kestrl_operator.state.cluster import identity_of, storage_of
from kestrl_operator.state.jobs import Key

NAMED = "storage.serviceAccount=training"
AMAZON: dict[str, Any] = {"name": "training"}
AZURE: dict[str, Any] = {"name": "training", "podLabels": {"azure.workload.identity/use": "true"}}
GOOGLE: dict[str, Any] = {
    "name": "training",
    "metadataServices": [
        {"cidr": "169.254.169.254/32", "ports": [80, 8080]},
        {"cidr": "169.254.169.252/32", "ports": [987, 988]},
    ],
}
"""For GKE's Dataplane V2, and for Calico, as in "Workload Identity Federation for GKE", network policy."""
OPENED = {(service["cidr"], port) for service in GOOGLE["metadataServices"] for port in service["ports"]}
EKS_TOKEN = "/var/run/secrets/eks.amazonaws.com/serviceaccount/"


def values(account: dict[str, Any], **storage: Any) -> dict[str, Any]:
    return {"serviceAccounts": [account], "storage": {"uri": "s3://bucket/runs", **storage}}


def pods(account: dict[str, Any], *overrides: str) -> dict[str, dict[str, Any]]:
    """The pod templates of a job under an account, by role."""
    objects = rendered(*overrides, identity=ServiceAccount.model_validate(account))
    return {
        name.removeprefix("email-search-"): item["spec"]["template"]
        for name, item in of_kind(objects, "StatefulSet", "Deployment").items()
    }


def eks_webhook(template: dict[str, Any]) -> dict[str, Any]:
    """The change that amazon-eks-pod-identity-webhook makes to a pod whose ServiceAccount names a role."""
    pod = copy.deepcopy(template)
    skipped = pod["metadata"].get("annotations", {}).get("eks.amazonaws.com/skip-containers", "").split(",")
    spec = pod["spec"]
    source = {"serviceAccountToken": {"audience": "sts.amazonaws.com", "expirationSeconds": 86400, "path": "token"}}
    spec["volumes"].append({"name": "aws-iam-token", "projected": {"sources": [source]}})
    for container in (*spec["containers"], *spec["initContainers"]):
        if container["name"] not in skipped:
            container["env"].append({"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": f"{EKS_TOKEN}token"})
            container["volumeMounts"].append({"name": "aws-iam-token", "mountPath": EKS_TOKEN, "readOnly": True})
    return pod


def test_pods_that_use_object_storage_run_as_the_account_and_no_others() -> None:
    accounts = {role: pod["spec"]["serviceAccountName"] for role, pod in pods(AMAZON).items()}
    own = "email-search-agentrljob"
    assert accounts == {"inference": "training", "learner": "training", "rollout": own, "tools": own, "judge": own}
    fetched = pods(AMAZON, "model.base=s3://models/qwen")
    assert fetched["rollout"]["spec"]["serviceAccountName"] == "training", "prepare fetches the tokenizer there"
    assert {pod["spec"]["automountServiceAccountToken"] for pod in fetched.values()} == {False}


def test_the_eks_webhook_gives_its_token_to_the_containers_that_use_storage() -> None:
    """Not to the engine, nor to the worker, in which loops of the job run. The token's volume is the webhook's own, so
    that no token of the API server is mounted, and the group of our pods may read it."""
    fetched = pods(AMAZON, "model.base=s3://models/qwen")
    holders: dict[str, set[str]] = {}
    for role in ("inference", "learner", "rollout"):
        spec = eks_webhook(fetched[role])["spec"]
        holders[role] = {
            container["name"]
            for container in (*spec["containers"], *spec["initContainers"])
            if any(mount["mountPath"] == EKS_TOKEN for mount in container["volumeMounts"])
        }
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["fsGroup"] == 10001
    assert holders == {"inference": {"inference", "prepare"}, "learner": {"learner", "prepare"}, "rollout": {"prepare"}}


def test_the_azure_webhook_knows_pods_by_their_label_and_skips_the_engine() -> None:
    labelled = pods(AZURE)
    uses = {role for role, pod in labelled.items() if pod["metadata"]["labels"].get("azure.workload.identity/use")}
    assert uses == {"inference", "learner"}
    assert labelled["inference"]["metadata"]["annotations"]["azure.workload.identity/skip-containers"] == "engine"
    assert "azure.workload.identity/skip-containers" not in labelled["learner"]["metadata"]["annotations"]


def egress(objects: list[dict[str, Any]]) -> dict[str, set[tuple[str, int]]]:
    """Blocks within metadata services, and ports, that each policy opens."""
    return {
        name: {
            (peer["ipBlock"]["cidr"], port["port"])
            for rule in policy["spec"].get("egress", ())
            for peer in rule.get("to", ())
            for port in rule["ports"]
            if "ipBlock" in peer and peer["ipBlock"]["cidr"] != "0.0.0.0/0"
        }
        for name, policy in of_kind(objects, "NetworkPolicy").items()
    }


def test_a_metadata_service_is_open_to_the_pods_that_use_the_identity_alone() -> None:
    opened = egress(rendered(identity=ServiceAccount.model_validate(GOOGLE)))
    assert {name.removeprefix("email-search-"): blocks for name, blocks in opened.items() if blocks} == {
        "inference": OPENED,
        "learner": OPENED,
    }
    assert not any(egress(rendered(identity=ServiceAccount.model_validate(AMAZON))).values())
    assert not any(egress(rendered()).values())


def test_an_sftjob_has_the_same_and_is_refused_alike() -> None:
    objects = sft_rendered(values(GOOGLE), storage={"serviceAccount": "training"})
    pod = objects[-1]["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("training", False)
    assert egress(objects)["warm-up-sft"] == OPENED
    with pytest.raises(UserInputError, match=r"^spec\.storage\.serviceAccount: 'other'"):
        sft_rendered(values(GOOGLE), storage={"serviceAccount": "other"})


@pytest.mark.parametrize(
    ("account", "message"),
    [
        ({"name": "other"}, "there are: other"),
        ({"name": "training", "namespaces": ["team-b"]}, "there are: none"),
    ],
)
def test_a_name_that_is_not_listed_for_the_namespace_is_refused_by_field(account: dict[str, Any], message: str) -> None:
    cluster = read_cluster({**VALUES, **values(account)})
    raw = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"uid": "u-1"},
        "spec": job(NAMED).spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    with pytest.raises(UserInputError, match=r"^spec\.storage\.serviceAccount: 'training' is not one") as refused:
        Manifests(cluster, b"k" * 32).read(Key(NAMESPACE, "email-search"), raw)
    assert message in str(refused.value)
    assert "jobs.serviceAccounts" in str(refused.value)


def test_the_cluster_s_default_is_for_jobs_that_take_the_default_storage() -> None:
    cluster = read_cluster({**VALUES, **values(AMAZON, serviceAccount="training", secret="keys")})
    assert identity_of(job(), NAMESPACE, cluster) == ServiceAccount(name="training")
    assert identity_of(job("storage.uri=s3://mine/runs"), NAMESPACE, cluster) is None
    assert identity_of(job("storage.secretRef={name: mine}"), NAMESPACE, cluster) is None
    assert storage_of(job(), cluster) == ("s3://bucket/runs", "keys")
    assert storage_of(job(NAMED), cluster) == ("s3://bucket/runs", None), "keys would be taken in place of it"


NO_PORTS: dict[str, Any] = {"cidr": "169.254.169.254/32", "ports": []}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"storage": {"uri": "s3://b/r", "serviceAccount": "training"}}, "is not listed in serviceAccounts"),
        ({"serviceAccounts": [{**AMAZON, "podLabels": {"kestrl.dev/job": "x"}}]}, "belongs to the operator"),
        (
            {"serviceAccounts": [{**AMAZON, "metadataServices": [{"cidr": "10.0.0.0/8", "ports": [80]}]}]},
            f"10.0.0.0/8 is not within {METADATA[0]}",
        ),
        ({"serviceAccounts": [{**AMAZON, "metadataServices": [NO_PORTS]}]}, "ports"),
    ],
)
def test_values_that_open_more_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_cluster({**VALUES, **changed})
