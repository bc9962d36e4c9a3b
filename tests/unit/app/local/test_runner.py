"""A run that is sent elsewhere while it goes on: whatever becomes of that changes nothing of its outcome."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.ports import free_port
from tests.fakes.stored_runs import make_run

from kestrl._app.local.report import RunOutcome
from kestrl._app.local.rundir import RunDir
from kestrl._app.local.runner import Runner, RunOptions
from kestrl._app.local.view import PlainView
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl.errors import EngineFailure

Report = Callable[[str, bool], None]
LEARNER = "from pathlib import Path\nimport time\nwhile not Path('followed').exists(): time.sleep(0.01)\n"


class Follower:
    """Reports that its server is down, and then does what the test says."""

    name = "mlflow"

    def __init__(self, finish: str) -> None:
        self._finish = finish
        self.cancelled = False

    async def follow(self, run: RunDir, report: Report) -> None:
        report("waiting: it is down", True)
        (run.path / "followed").touch()
        if self._finish == "broken":
            raise EngineFailure("it broke", code="broken")
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True

    async def finish(self, run: RunDir, report: Report) -> None:
        del run
        match self._finish:
            case "sent":
                report("sent 2 episodes", False)
            case "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            case _:
                raise OSError("no file is left")


@pytest.mark.parametrize(
    ("finish", "last"),
    [
        ("sent", "sent 2 episodes"),
        ("broken", "the rest was not sent: no file is left"),
        ("interrupted", "interrupted before the rest was sent"),
    ],
)
async def test_what_a_run_is_sent_to_changes_nothing_of_its_outcome(tmp_path: Path, finish: str, last: str) -> None:
    run = RunDir(make_run(tmp_path / "job-1"))
    for folder in ("logs", "settings"):
        (run.path / folder).mkdir()
    (run.path / "ends.py").write_text(LEARNER)
    place = ReplicaEndpoint(bind="127.0.0.1", host="127.0.0.1", port=free_port())
    site = Site(
        run="job-1", endpoint=lambda role, index: place, model="m", template=None, train="t", validation=None,
        storage="s", database="d", work_dir=str(tmp_path), engines_file=str(tmp_path / "engines.json"),
    )  # fmt: skip
    learner = Component(name="learner-0", role=Role.LEARNER, module="ends", restarts=False)
    follower = Follower(finish)
    options = RunOptions(manifest_dir=tmp_path, cache_dir=tmp_path, follower=follower)
    console = Console(record=True, width=200, file=StringIO())
    runner = Runner(run.job(), run, site, [learner], PlainView(console), options, {})
    assert await runner.run() == RunOutcome(0)
    assert follower.cancelled or finish == "broken"
    record = run.record()
    assert record is not None
    assert (record.followers, record.ended) == ({"mlflow": last}, 0)
    shown = console.export_text()
    assert "warning: mlflow: waiting: it is down" in shown
    assert last in shown
