"""What sends a run from a pod beside it: a server that is down ends it with the reason, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.fakes.stored_runs import make_group, make_run, store_step, store_summary

from kestrl._app.push import pod
from kestrl._app.push.target import TargetUnavailable
from kestrl._shared.plan.settings.tracking import TrackingSettings
from kestrl.runstate.states import RunPhase

DOWN = "http://127.0.0.1:9"
"""The port of the protocol Discard, where nothing listens."""
ABSENT = {"duckdb", "rich", "typer", "uv", "starlette"}
"""Packages of the program `kestrl` that images of workers do not have."""


def settings(run: Path, uri: str = DOWN) -> TrackingSettings:
    return TrackingSettings(
        job="job", run=run.name, storage=run.as_uri(), settings={}, uri=uri, experiment="", sample=1.0,
        ready_file=str(run / "ready"),
    )  # fmt: skip


def test_a_server_that_is_down_for_long_ends_it_with_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr(pod, "POLL_SECONDS", 0.01)
    (run / "ready").touch()  # of the container before
    with pytest.raises(TargetUnavailable, match=f"MLflow at {DOWN} does not answer"):
        pod.send(settings(run))
    assert not (run / "ready").exists()
    assert capsys.readouterr().out.startswith(f"waiting: MLflow at {DOWN} does not answer")


def test_a_signal_has_it_send_the_rest_and_say_what_it_could_not(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(settings(run).model_dump_json())
    program = [sys.executable, "-m", "kestrl._app.push.pod", "--settings", str(path)]
    with subprocess.Popen(program, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"waiting: ")
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert f"MLflow at {DOWN} does not answer" in errors


ANSWERS = {
    "experiments/get-by-name": b'{"experiment": {"experiment_id": "1"}}',
    "runs/create": b'{"run": {"info": {"run_id": "r", "status": "RUNNING"}}}',
}
"""What a server answers to a method; others are answered by an empty object."""


class Receiver:
    """What a server was sent: methods and paths, with their bodies."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.traced = Event()
        """Set once traces have come."""

    def bodies(self, method: str) -> list[bytes]:
        return [body for name, body in self.requests if name == method]


@contextmanager
def receiving() -> Generator[tuple[str, Receiver]]:
    """A server with MLflow's methods, of which a real one is in `test_mlflow.py`."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            method = self.path.partition("?")[0].removeprefix("/api/2.0/mlflow/")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            receiver.requests.append((method, body))
            content = ANSWERS.get(method, b"{}")
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            if method == "/v1/traces":
                receiver.traced.set()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
            """Writes nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_run_is_sent_as_it_is_stored_and_the_rest_after_a_signal(tmp_path: Path) -> None:
    run, path = make_run(tmp_path / "runs" / "job-1"), tmp_path / "settings.json"
    store_step(run, 1, [make_group("g1")], {"reward": 0.25})
    with receiving() as (uri, receiver):
        path.write_text(settings(run, uri).model_dump_json())
        program = [sys.executable, "-m", "kestrl._app.push.pod", "--settings", str(path)]
        with subprocess.Popen(program, env=dict(os.environ), stderr=subprocess.PIPE) as process:
            assert receiver.traced.wait(60)
            store_step(run, 2, [make_group("g2")], {"reward": 0.5})
            store_summary(run, RunPhase.SUCCEEDED, steps=2)
            process.send_signal(signal.SIGTERM)
            errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, b"")
    assert (run / "ready").exists(), "what was stored has been received"
    assert len(receiver.bodies("runs/create")) == 1
    assert b"".join(receiver.bodies("/v1/traces")).count(b"g2/0") > 0
    assert b"FINISHED" in receiver.bodies("runs/update")[-1]


def test_it_needs_only_packages_of_a_worker() -> None:
    program = "import sys, kestrl._app.push.pod; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not ABSENT & set(shown.stdout.split())
