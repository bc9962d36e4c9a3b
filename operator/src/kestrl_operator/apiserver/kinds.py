"""The kinds of objects that the operator reads or writes."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kubernetes.aio.dynamic.resource import Resource

from kestrl._shared.spec.crd import GROUP, PLURAL, SFT_PLURAL, VERSION
from kestrl._shared.spec.job import KIND
from kestrl._shared.spec.sft import SFT_KIND
from kestrl_operator.state import admission


class Kind(NamedTuple):
    """A kind of object."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


JOB = Kind(GROUP, VERSION, KIND, PLURAL)
SFT_JOB = Kind(GROUP, VERSION, SFT_KIND, SFT_PLURAL)
BATCH_JOB = Kind("batch", "v1", "Job", "jobs")
POD = Kind("", "v1", "Pod", "pods")
STATEFUL_SET = Kind("apps", "v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
OLD_EVENT = Kind("", "v1", "Event", "events")
"""The same kind in the API version that supports selection by reason."""
REVIEW = Kind("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")
DEFINITION = Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
NODE = Kind("", "v1", "Node", "nodes")
SERVICE = Kind("", "v1", "Service", "services")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
KUEUE_WORKLOAD = Kind(admission.GROUP, admission.VERSION, admission.KIND, "workloads")
"""What Kueue admits: the quota for a whole job."""
RESOURCE_FLAVOR = Kind(admission.GROUP, admission.VERSION, "ResourceFlavor", "resourceflavors")
WORKLOAD_PRIORITY = Kind(admission.GROUP, admission.VERSION, admission.PRIORITY_KIND, "workloadpriorityclasses")
APPLIED = (
    Kind("", "v1", "Secret", "secrets"),
    Kind("", "v1", "ConfigMap", "configmaps"),
    Kind("", "v1", "ServiceAccount", "serviceaccounts"),
    SERVICE,
    STATEFUL_SET,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
)
"""What a job becomes."""
_BY_NAME = {(kind.api_version, kind.name): kind for kind in (LEASE, *APPLIED, KUEUE_WORKLOAD)}
_CLUSTER_WIDE = frozenset({REVIEW, DEFINITION, NODE, RESOURCE_FLAVOR, WORKLOAD_PRIORITY})


def kind_of(body: Any) -> Kind:
    """The kind of an object to apply."""
    return _BY_NAME[body["apiVersion"], body["kind"]]


@cache
def resource(kind: Kind) -> Any:
    """The client's description of a kind. It is not discovered, which would keep a file in a shared folder."""
    return Resource(
        prefix="apis" if kind.group else "api",
        group=kind.group,
        api_version=kind.version,
        kind=kind.name,
        namespaced=kind not in _CLUSTER_WIDE,
        name=kind.plural,
        subresources={"status": {"kind": kind.name, "name": f"{kind.plural}/status", "namespaced": True}},
    )
