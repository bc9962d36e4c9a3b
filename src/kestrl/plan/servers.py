"""Servers outside the job that its components call. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


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
