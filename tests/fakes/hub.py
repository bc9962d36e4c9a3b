"""The API of the Hugging Face Hub, as far as its own client needs it to upload small files to a model repository, and
to download one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What was uploaded."""

    url: str = ""
    repositories: list[str] = field(default_factory=list[str])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files of the last commit, by path."""
    requests: list[str] = field(default_factory=list[str])
    read_only: bool = False
    """Whether the token may not write."""
    model: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files of the repository that is downloaded, by path."""
    half_way: Callable[[str], None] = lambda path: None
    """Called with the path of a file of which half was sent."""


@contextmanager
def serving_hub() -> Generator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class names it
            """Prints nothing."""

        def _answer(self, status: int, document: Any) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refused(self) -> bool:
            hub.requests.append(f"{self.command} {self.path}")
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return False
            self._answer(401, {"error": "Invalid credentials"})
            return True

        def do_GET(self) -> None:
            if self._refused():
                return
            if self.path == "/api/whoami-v2":
                self._answer(200, {"name": "person", "type": "user"})
            elif "/revision/" in self.path:
                self._answer(200, {"id": self.path.split("/models/")[1].partition("/revision/")[0], "sha": COMMIT})
            elif "/tree/" in self.path:
                sizes = {path: len(content) for path, content in hub.model.items()}
                files = [{"type": "file", "path": path, "size": size, "oid": path} for path, size in sizes.items()]
                self._answer(200, files)
            elif "/resolve/" in self.path:
                self._send_file()
            else:
                self._answer(404, {"error": "no"})

        def do_HEAD(self) -> None:
            if not self._refused():
                self._send_file()

        def _send_file(self) -> None:
            path = self.path.partition(f"/resolve/{COMMIT}/")[2]
            content = hub.model[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                half = len(content) // 2
                with suppress(ConnectionError):  # of a client that was killed
                    self.wfile.write(content[:half])
                    self.wfile.flush()
                    hub.half_way(path)
                    self.wfile.write(content[half:])

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self._refused():
                return
            if hub.read_only:
                self._answer(403, {"error": "You may not write"})
            elif self.path == "/api/repos/create":
                document = json.loads(body)
                name = "/".join(filter(None, (document.get("organization"), document["name"])))
                hub.repositories.append(name)
                self._answer(200, {"url": f"{hub.url}/{name}", "name": name})
            elif "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                self._answer(200, {"files": files})
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                values = [line["value"] for line in lines if line["key"] == "file"]
                hub.files = {value["path"]: base64.b64decode(value["content"]) for value in values}
                self._answer(
                    200, {"commitUrl": f"{hub.url}/{hub.repositories[-1]}/commit/{COMMIT}", "commitOid": COMMIT}
                )
            else:
                self._answer(200, {})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
