"""Servers outside the job that its components call. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

METADATA = ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32")
"""Metadata services, with which clouds give a node its identity and credentials: most clouds, Alibaba's, Azure's."""


class RemoteServer(NamedTuple):
    """A server at a URL of the manifest."""

    host: str
    port: int
    field: str
    """Manifest field, for messages."""

    @property
    def namespace(self) -> str | None:
        """Namespace of a Service of the cluster (`NAME.NAMESPACE.svc...`); None for any other host."""
        labels = self.host.split(".")
        return labels[1] if len(labels) > 2 and labels[2] == "svc" else None


def server_at(address: str, field: str) -> RemoteServer:
    """The server at a URL; its port is that of the scheme if none is given."""
    url = urlsplit(address)
    return RemoteServer(url.hostname or "", url.port or (443 if url.scheme == "https" else 80), field)


def is_cluster_name(host: str) -> bool:
    """Whether a name is one that the DNS of a cluster answers: a Service (`NAME.NAMESPACE.svc...`), or one label."""
    labels = host.rstrip(".").split(".")
    return ":" not in host and (len(labels) == 1 or labels[-1] == "svc" or labels[2:3] == ["svc"])
