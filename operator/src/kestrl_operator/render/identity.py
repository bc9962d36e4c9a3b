"""The cloud identity of pods that use object storage: their ServiceAccount, and what the clouds' webhooks know them by.
Pure.

KestRL mounts no token. Where a pod's ServiceAccount has a role of the cloud, the cloud's own webhook adds a projected
token to the pod, with the cloud as its audience; `automountServiceAccountToken: false`, which shuts off the API
server's token, does not concern it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl_operator.state.chart_values import ServiceAccount

Object = dict[str, Any]
SKIPPED: Mapping[str, str] = {
    "eks.amazonaws.com/skip-containers": ",",
    "azure.workload.identity/skip-containers": ";",
}
"""Annotations with the containers that a cloud's webhook gives no token, and how each separates their names."""


def with_identity(template: Object, account: ServiceAccount, users: Sequence[str]) -> Object:
    """A PodTemplate under a ServiceAccount with a cloud identity.

    Args:
        template: The template.
        account: The ServiceAccount.
        users: Containers that use object storage; the others get no token.
    """
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    metadata["labels"] = {**account.pod_labels, **metadata.get("labels", {})}
    skipping = [item["name"] for item in spec["containers"] if item["name"] not in users]
    if skipping:
        skipped = {name: separator.join(skipping) for name, separator in SKIPPED.items()}
        metadata["annotations"] = {**metadata.get("annotations", {}), **skipped}
    return {"metadata": metadata, "spec": {**spec, "serviceAccountName": account.name}}


def metadata_egress(account: ServiceAccount | None) -> list[Object]:
    """Rules of a NetworkPolicy to the metadata services that give the identity its credentials."""
    services = account.metadata_services if account is not None else ()
    return [
        {
            "to": [{"ipBlock": {"cidr": service.cidr}}],
            "ports": [{"port": port, "protocol": "TCP"} for port in service.ports],
        }
        for service in services
    ]
