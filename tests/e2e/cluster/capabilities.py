"""Capabilities of a cluster that tests may need."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """What a cluster offers beyond the API. A test is skipped if a capability that it needs is missing."""

    NODE = "node"
    """Pods run."""
    HOST_PATHS = "host_paths"
    """Pods of labelled namespaces have the checkout and its virtual environment mounted."""
    HOST_ADDRESS = "host_address"
    """Pods reach servers of this process, at `Cluster.host_address`."""
    POD_ROUTES = "pod_routes"
    """This process reaches pods and services by their addresses."""
    NETWORK_POLICIES = "network_policies"
    """NetworkPolicies are enforced, or can be."""
    FAKE_DEVICES = "fake_devices"
    """The node can offer devices that do not exist."""
    DAEMONS = "daemons"
    """Kubernetes' daemons can be stopped, frozen and killed."""
    FAKE_NODES = "fake_nodes"
    """Nodes can be added that exist only in the API."""


ANYWHERE = frozenset({Capability.DAEMONS, Capability.FAKE_NODES})
"""Capabilities of the harness's own node without a kubelet."""
OWN = frozenset(Capability)
"""Capabilities of the harness's own complete node."""
