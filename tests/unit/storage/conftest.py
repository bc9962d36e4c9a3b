"""Stores on the local file system and on a real S3 server, for the same tests, and a proxy that injects faults."""

from __future__ import annotations

import http.client
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.fakes.s3 import S3Server

from kestrl.storage import ObjectStore, open_store


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.servers)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_store((tmp_path / "storage").as_uri())
    request.getfixturevalue("s3_environment")
    return open_store(f"s3://runs/{uuid.uuid4().hex}")


Fault = Callable[["Handler", bytes], bool]
"""Answers a request by itself and says so, or lets it through."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for those that a fault answers; counts both."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.fault: Fault = lambda handler, body: False
        self.asked: list[str] = []
        self.half_way = threading.Event()
        self.over = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it is called by
        return

    def _pass(self) -> None:
        proxy = self.server
        proxy.asked.append(self.command)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2)
        proxy.half_way.set()
        if proxy.fault(self, body):
            return
        body += self.rfile.read(length - length // 2)
        with closing(http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=30)) as upstream:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", answer.headers.get("Content-Length") or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass  # noqa: N815 - the names they are called by


@pytest.fixture
def proxy(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the S3 server from now on."""
    with Proxy(s3_environment.ports["proxy"]) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
        proxy.over.set()
        proxy.shutdown()
