"""An HTTP server of this process, beside the cluster, which its pods reach."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import NamedTuple, Self

from .client import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A received request."""

    method: str
    path: str
    """With its query."""
    headers: Message
    body: bytes


class Response(NamedTuple):
    """What a request is answered with."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"


class HostServer(http.server.ThreadingHTTPServer):
    """Serves in a thread of its own from the beginning of a `with` block to its end.

    Args:
        cluster: The cluster, which has routes of pods.
        answer: What a request is answered with. Called in a thread for each connection.
        port: The port to listen on; 0 takes a free one.
        key: The bearer token that a request has to have, for which others get 401; empty asks for none. It may change
            while the server runs.
        tls: For HTTPS.
    """

    def __init__(
        self,
        cluster: Cluster,
        answer: Callable[[Request], Response],
        *,
        port: int = 0,
        key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__((cluster.host_address, port), _Exchange)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.answer, self.key = answer, key
        self.accepted = 0
        """Requests that were answered, not refused for their token."""
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def response_to(self, request: Request) -> Response:
        """The answer, if the request may have one."""
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return Response(401, b"unauthorized", "text/plain")
        self.accepted += 1
        return self.answer(request)


class _Exchange(http.server.BaseHTTPRequestHandler):
    """A request and its answer."""

    server: HostServer

    def do_GET(self) -> None:
        self._exchange()

    def do_POST(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(method=self.command, path=self.path, headers=self.headers, body=body)
        response = self.server.response_to(request)
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        pass
