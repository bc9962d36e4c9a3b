"""What sends a run from a pod beside it: a server that is down ends it with the reason, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kestrl._app.push import pod
from kestrl._app.push.target import TargetUnavailable
from kestrl._shared.plan.settings.tracking import TrackingSettings

DOWN = "http://127.0.0.1:9"
"""The port of the protocol Discard, where nothing listens."""
ABSENT = {"duckdb", "rich", "typer", "uv", "starlette"}
"""Packages of the program `kestrl` that images of workers do not have."""


def settings(run: Path) -> TrackingSettings:
    return TrackingSettings(
        job="job", run=run.name, storage=run.as_uri(), settings={}, uri=DOWN, experiment="", sample=1.0,
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


def test_it_needs_only_packages_of_a_worker() -> None:
    program = "import sys, kestrl._app.push.pod; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not ABSENT & set(shown.stdout.split())
