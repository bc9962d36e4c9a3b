"""An engine of a command: its end, and a start that fails. A small HTTP server stands in for it."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from kestrl._app.engines.running import EngineKeys, EngineStartError, running_engine
from kestrl._app.ports import reserved_port
from kestrl._shared import engine_failure
from kestrl._shared.plan.components import Component, Device, Ready, Role

KEYS = EngineKeys(data="data", control="control")


def component(folder: Path, module: str, *args: str, port: int) -> Component:
    return Component(
        name="engine-0",
        role=Role.ENGINE,
        module=module,
        args=args,
        ports={"http": port},
        ready=Ready(port=port, http_path="/"),
        device=Device(profile="cpu", count=0),
        env={engine_failure.VARIABLE: str(folder / "failure.json")},
    )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_engine_answers_in_the_context_and_has_ended_behind_it(tmp_path: Path) -> None:
    with reserved_port() as port:
        server = component(tmp_path, "http.server", str(port), "--bind", "127.0.0.1", port=port)
        with running_engine(server, KEYS, tmp_path, tmp_path / "log") as engine:
            with urllib.request.urlopen(engine.url) as answer:
                assert answer.status == 200
            assert is_running(engine.process.pid)
    assert engine.process.returncode == 128 + 9
    assert "GET / HTTP" in (tmp_path / "log").read_text()


def test_an_engine_that_ends_at_its_start_is_named_with_its_log(tmp_path: Path) -> None:
    broken = component(tmp_path, "no_such_module", port=9)
    with (
        pytest.raises(EngineStartError, match=r"it ended with status 1; its log is .*log"),
        running_engine(broken, KEYS, tmp_path, tmp_path / "log"),
    ):
        pass
    assert "No module named no_such_module" in (tmp_path / "log").read_text()
