"""A real S3 server for tests: OpenStack Swift with its `s3api`, four small processes over one folder, up in a few
seconds. `python -m tests.fakes.s3 FOLDER HOST` serves one at the ports of `PORTS`, until it is terminated.

Swift comes from PyPI (the `test-servers` dependency group). Known limitations: `If-Match` on PUT answers 501, and two
simultaneous PUTs with `If-None-Match: *` may both succeed.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from getpass import getuser
from http import HTTPStatus
from pathlib import Path

import obstore
from obstore.store import S3Store
from tests.fakes.ports import free_port

ACCESS_KEY = "test:tester"
SECRET_KEY = "testing"
START_SECONDS = 60.0

_SWIFT = """
[swift-hash]
swift_hash_path_suffix = kestrl
swift_hash_path_prefix = kestrl
[storage-policy:0]
name = only
default = yes
"""
_DEFAULTS = """
[DEFAULT]
bind_ip = {host}
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
fallocate_reserve = 0
workers = 0
log_address = /nonexistent
"""
_STORAGE = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
_FILTERS: Mapping[str, str] = {
    "catch_errors": "",
    "gatekeeper": "",
    "listing_formats": "",
    "bulk": "",
    "s3api": "location = us-east-1",
    "tempauth": "user_test_tester = testing .admin",
    "slo": "",
    "dlo": "",
    "versioned_writes": "allow_versioned_writes = true",
}
"""Filters of the proxy pipeline, in order, with their options."""
_PROXY = "\n".join(
    (
        f"[pipeline:main]\npipeline = {' '.join(_FILTERS)} proxy-server",
        "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true",
        *(f"[filter:{name}]\nuse = egg:swift#{name}\n{options}" for name, options in _FILTERS.items()),
    )
)
KINDS: tuple[str, ...] = ("account", "container", "object", "proxy")
PORTS: Mapping[str, int] = {"proxy": 9000, "account": 9001, "container": 9002, "object": 9003}
"""Ports of a server that has its network to itself."""


@dataclass(slots=True)
class S3Server:
    """A running server. Its content survives `stop` and `start`."""

    folder: Path
    ports: Mapping[str, int]
    host: str = "127.0.0.1"
    """Address of the proxy; the other servers are always on loopback."""
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports['proxy']}"

    def environment(self, *, secret: str = SECRET_KEY) -> dict[str, str]:
        """Environment variables for AWS clients."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def rotate(self, secret: str) -> None:
        """Takes another secret key from now on; the former is denied. The account stays the same."""
        path = self.folder / "proxy.conf"
        key = re.compile(r"(?<=user_test_tester = )\S+")
        path.write_text(key.sub(secret, path.read_text()))
        proxy = self._processes.pop("proxy", None)
        if proxy is not None:
            proxy.terminate()
            proxy.wait(10)
        self.start()

    def create_bucket(self, name: str) -> S3Store:
        """Creates a bucket if there is none, and returns a client for it that is independent of KestRL."""
        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        return store

    def start(self) -> None:
        """Starts servers that are not running, and waits until requests are answered.

        The proxy is the last: it answers that there is no such bucket while it cannot ask where the bucket is.
        """
        deadline = time.monotonic() + START_SECONDS
        for kind in KINDS:
            if kind == "proxy":
                self._await_ports(KINDS[:-1], deadline)
            if kind not in self._processes:
                program = Path(sys.executable).with_name(f"swift-{kind}-server")
                with (self.folder / f"{kind}.log").open("ab") as log:
                    self._processes[kind] = subprocess.Popen(
                        [program, self.folder / f"{kind}.conf", "-v"], stdout=log, stderr=log
                    )
        self._await_ports(("proxy",), deadline)

    def _await_ports(self, kinds: Sequence[str], deadline: float) -> None:
        for kind in kinds:
            host = self.host if kind == "proxy" else "127.0.0.1"
            _await_port(host, self.ports[kind], self._processes[kind], deadline, self.folder / f"{kind}.log")

    def stop(self) -> None:
        """Stops all four servers."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def _await_port(host: str, port: int, process: subprocess.Popen[bytes], deadline: float, log: Path) -> None:
    while True:
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start: {log.read_text()[-2000:]}") from error
            # There is no event to await for an open port.
            time.sleep(0.05)


_RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, *ports = sys.argv[1:]
for kind, port in (item.split("=") for item in ports):
    builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1", "weight": 1.0})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{kind}.ring.gz")
"""


def _make_rings(folder: Path, ports: Mapping[str, int]) -> None:
    """Builds the rings in a child process, since importing Swift patches sockets and threads with eventlet."""
    arguments = [f"{kind}={port}" for kind, port in ports.items() if kind != "proxy"]
    subprocess.run([sys.executable, "-c", _RINGS, folder, *arguments], check=True)


@contextmanager
def serving_s3(folder: Path, *, host: str = "127.0.0.1", ports: Mapping[str, int] | None = None) -> Generator[S3Server]:
    """A server over `folder` (on a file system with extended attributes), stopped at the end of the block.

    Args:
        folder: Folder for content and configuration.
        host: An address of this machine; not loopback if there are clients on other machines.
        ports: The servers' ports; free ones if None.
    """
    ports = ports or {kind: free_port(host if kind == "proxy" else "127.0.0.1") for kind in KINDS}
    (folder / "devices" / "d1").mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text(_SWIFT)
    for kind in KINDS:
        bind = host if kind == "proxy" else "127.0.0.1"
        facts = {"kind": kind, "port": ports[kind], "host": bind, "folder": folder, "user": getuser()}
        body = _PROXY if kind == "proxy" else _STORAGE
        (folder / f"{kind}.conf").write_text(_DEFAULTS.format(**facts) + body.format(**facts))
    _make_rings(folder, ports)
    server = S3Server(folder, ports, host)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def main(folder: str, host: str) -> None:
    """Serves until SIGTERM or SIGINT."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), serving_s3(Path(folder), host=host, ports=PORTS):
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
