"""The operator's Workloads under Kueue's own definitions on a real API server, without its controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.kit import kueue_folder
from tests.unit.operator.rendering import rendered
from tests.unit.operator.samples import NOW, job

from kestrl_operator.apiserver.client import Api, ApiProblem
from kestrl_operator.apiserver.kinds import KUEUE_WORKLOAD
from kestrl_operator.render.quota import quota_request, workload_object
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import QuotaHolder, QuotaUse, admission_of
from kestrl_operator.state.jobs import Key
from kestrl_operator.status.quota import finished, released, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.share(4)]
UID = "11111111-1111-4111-8111-111111111111"
TIME = "2026-01-01T00:00:00Z"
Object = dict[str, Any]


def is_established(definition: Object) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)


@pytest.fixture(scope="module")
def kueue_kinds(control_plane: Cluster) -> Iterator[Cluster]:
    """The cluster with Kueue's definitions, from its Go module."""
    bases = kueue_folder() / "config/components/crd/bases"
    paths = [bases / f"kueue.x-k8s.io_{plural}.yaml" for plural in ("workloads", "workloadpriorityclasses")]
    for path in paths:
        control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        control_plane.wait_for("customresourcedefinition", name, is_established)
    yield control_plane
    for path in paths:
        control_plane.kubectl("delete", "--ignore-not-found", "-f", str(path))


def condition(kind: str, status: str) -> Object:
    return {"type": kind, "status": status, "reason": kind, "message": "", "lastTransitionTime": TIME}


def use(namespace: str) -> QuotaUse:
    """The end of the job."""
    holder = QuotaHolder(kind="AgentRLJob", key=Key(namespace, "one"), uid=UID)
    return QuotaUse(holder=holder, now=NOW, queue="gpus", quota=None, occupied=False, ready=False, end="Completed")


async def test_kueues_definitions_take_what_the_operator_writes(
    kueue_kinds: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kueue_kinds.kubeconfig))
    request = quota_request(job().spec, rendered(), "gpus", "urgent")
    api = Api()
    with kueue_kinds.namespace() as namespace:
        try:
            body = workload_object(use(namespace).holder, request, 1000)
            # Without an owner: Kubernetes deletes what belongs to a job that is not there.
            del body["metadata"]["ownerReferences"]
            admission = admission_of(await api.apply(body))
            assert (admission.request, admission.priority_class, admission.active) == (request.digest, "urgent", True)
            assignments = [{"name": item["name"], "flavors": {"cpu": "spot"}} for item in request.pod_sets]
            granted = {"clusterQueue": "all", "podSetAssignments": assignments}
            reserved = [condition(kind, "True") for kind in ("QuotaReserved", "Admitted", "Evicted")]
            added = {"nodeSelector": {"pool": "made"}, "annotations": {"request": "r-1"}, "labels": {"slot": "1"}}
            check = {"name": "provisioned", "state": "Ready", "message": "", "lastTransitionTime": TIME}
            checks = [{**check, "podSetUpdates": [{"name": "learner", **added}]}]
            status = {"status": {"admission": granted, "conditions": reserved, "admissionChecks": checks}}
            kueue_kinds.patch("workloads.kueue.x-k8s.io", admission.name, status, namespace, subresource="status")
            admission = admission_of(await api.get(KUEUE_WORKLOAD, admission.name, namespace))
            assert admission.flavors["learner"] == ["spot"]
            assert admission.updates["learner"] == [Placement({"pool": "made"}, (), {"slot": "1"}, {"request": "r-1"})]
            await api.apply(body)  # the same request changes nothing, which Kueue allows
            for changes in (started(admission, NOW), released(admission, NOW)):
                admission = admission_of(
                    await api.merge_status(KUEUE_WORKLOAD, namespace, admission.name, admission.version, changes)
                )
            assert (admission.has("QuotaReserved"), admission.has("Admitted"), admission.flavors) == (False, False, {})
            with pytest.raises(ApiProblem):
                await api.merge_status(KUEUE_WORKLOAD, namespace, admission.name, "1", started(admission, NOW))
            changes = finished(admission, use(namespace))
            ended = await api.merge_status(KUEUE_WORKLOAD, namespace, admission.name, admission.version, changes)
            assert admission_of(ended).has("Finished")
        finally:
            await api.close()
