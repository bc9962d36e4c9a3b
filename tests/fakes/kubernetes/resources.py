"""Served kinds, refusals, and changes as watch streams deliver them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Object = dict[str, Any]
Place = tuple[str, ...]
"""The path to a field, through maps."""
Found = TypeVar("Found")
REASONS: Mapping[int, str] = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict",
    410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip
OWN_METADATA = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"}
)
"""Metadata that the server writes and no manager owns."""
APPLY, MERGE, TESTS = (f"application/{name}" for name in ("apply-patch+yaml", "merge-patch+json", "json-patch+json"))
WRITING = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object that is served."""

    group: str = ""
    version: str = "v1"
    kind: str
    plural: str
    namespaced: bool = True
    status: bool = False
    """Whether the status is a subresource, which only status requests write."""
    generation: bool = False
    """Whether changes of the spec increase the generation."""
    fixed: tuple[str, ...] = ()
    """Immutable fields, such as `spec.selector`."""
    schema: Mapping[str, Any] | None = None
    """OpenAPI schema; unknown fields are dropped, defaults filled in, invalid values refused."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full(self) -> str:
        """The full plural, as in messages: `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_OF_STATEFUL_SET = ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates")
_OF_EVENT = (
    "regarding",
    "related",
    "reason",
    "action",
    "note",
    "type",
    "eventTime",
    "reportingController",
    "reportingInstance",
)
BUILT_IN: tuple[Resource, ...] = (
    Resource(kind="Namespace", plural="namespaces", namespaced=False, status=True),
    Resource(kind="Node", plural="nodes", namespaced=False, status=True),
    Resource(kind="Pod", plural="pods", status=True),
    Resource(kind="Secret", plural="secrets"),
    Resource(kind="ConfigMap", plural="configmaps"),
    Resource(kind="ServiceAccount", plural="serviceaccounts"),
    Resource(kind="Service", plural="services", status=True),
    Resource(kind="PersistentVolumeClaim", plural="persistentvolumeclaims", status=True),
    Resource(group="apps", kind="StatefulSet", plural="statefulsets", status=True, generation=True,
             fixed=_OF_STATEFUL_SET),
    Resource(group="apps", kind="Deployment", plural="deployments", status=True, generation=True,
             fixed=("spec.selector",)),
    Resource(group="batch", kind="Job", plural="jobs", status=True, generation=True,
             fixed=("spec.selector", "spec.template")),
    Resource(group="policy", kind="PodDisruptionBudget", plural="poddisruptionbudgets", status=True, generation=True),
    Resource(group="networking.k8s.io", kind="NetworkPolicy", plural="networkpolicies", generation=True),
    Resource(group="coordination.k8s.io", kind="Lease", plural="leases"),
    Resource(group="events.k8s.io", kind="Event", plural="events", fixed=_OF_EVENT),
    Resource(kind="Event", plural="events"),
    Resource(
        group="authorization.k8s.io",
        kind="SelfSubjectAccessReview",
        plural="selfsubjectaccessreviews",
        namespaced=False,
    ),
    Resource(
        group="apiextensions.k8s.io",
        kind="CustomResourceDefinition",
        plural="customresourcedefinitions",
        namespaced=False,
        status=True,
        generation=True,
    ),
)  # fmt: skip
"""The built-in kinds; a CustomResourceDefinition that is created adds its own."""


class Refused(Exception):
    """An error answer of the server."""

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        self.reason = reason or REASONS.get(status, "Unknown")

    def body(self) -> Object:
        """The error as a Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one object, as delivered by watch streams."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    resource: Resource
    before: Object | None
    after: Object
    """The new state; for a deletion, the last one."""
    lost: bool = False
    """Whether no stream delivers it."""
