"""What a cluster offers to tests."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """Beyond the API, which every cluster has. A test skips without those that it asks for."""

    NODE = "node"
    """Pods run."""
    HOST_PATHS = "host_paths"
    """Pods of labelled namespaces find the checkout and its virtual environment in place."""
    HOST_ADDRESS = "host_address"
    """Pods reach servers of this process, at `Cluster.host_address`."""
    POD_ROUTES = "pod_routes"
    """This process reaches pods and services by their own addresses."""
    NETWORK_POLICIES = "network_policies"
    """They are enforced, or can be."""
    FAKE_DEVICES = "fake_devices"
    """The node can be given devices that do not exist."""
    DAEMONS = "daemons"
    """Kubernetes' own daemons can be stopped, frozen and killed."""
    FAKE_NODES = "fake_nodes"
    """Nodes can be added that exist only in the API."""


ANYWHERE = frozenset({Capability.DAEMONS, Capability.FAKE_NODES})
"""Of a node of the harness's own, without a kubelet too."""
OWN = frozenset(Capability)
"""Of a whole one."""
