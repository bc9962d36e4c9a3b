"""Logs that rotate while they are written, and who reads them meanwhile."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._app.local import logs
from kestrl._app.local.logs import LOG_BYTES, Log, LogFollower, older, tail
from kestrl._app.local.processes import Launcher, last_error
from kestrl._app.local.rundir import RunDir
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role


def held(path: Path) -> int:
    return sum(part.stat().st_size for part in (path, older(path)) if part.exists())


@given(pieces=st.lists(st.binary(max_size=40), max_size=60), limit=st.integers(40, 64))
def test_a_log_keeps_its_bound_and_the_newest_bytes(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], limit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.log"
    with closing(Log(path, 2 * limit)) as log:
        for piece in pieces:
            log.write(piece)
            assert held(path) <= 2 * limit
    whole = b"".join(pieces)
    assert whole.endswith(tail(path, 10_000))
    assert len(tail(path, 10_000)) >= min(len(whole), limit) - 40


def test_lines_are_not_split_between_two_files(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with closing(Log(path, 200)) as log:
        for number in range(50):
            log.write(b"line %04d\n" % number)
    for part in (path, older(path)):
        assert part.read_bytes().endswith(b"\n")
        assert all(len(line) == 9 for line in part.read_bytes().splitlines())
    assert tail(path, 30).splitlines()[-1] == b"line 0049"


def test_a_full_disk_ends_no_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Log(tmp_path / "a.log")) as log, Path("/dev/full").open("wb", buffering=0) as full:
        with monkeypatch.context() as changed:
            changed.setattr(log, "_file", full)
            log.write(b"lost\n")
        log.write(b"kept\n")
    assert (tmp_path / "a.log").read_bytes() == b"kept\n"


def test_a_reader_follows_over_rotations_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    seen = list[str]()
    with closing(Log(path, 200)) as log, closing(LogFollower(path, at_end=False)) as follower:
        for number in range(100):
            log.write(b"line %04d\nhalf" % number)
            seen += follower.lines()
            log.write(b" and half\n")
        seen += follower.lines()
    assert seen == [line for number in range(100) for line in (f"line {number:04d}", "half and half")]


def test_a_reader_that_is_early_waits_for_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with closing(LogFollower(path, at_end=True)) as follower:
        assert list(follower.lines()) == []
        with closing(Log(path)) as log:
            log.write(b"first\n")
        assert list(follower.lines()) == ["first"]


CHATTY = """
import sys
for number in range(300_000):
    print(f"line {number:06d}", "x" * 100)
print("error: the last words", file=sys.stderr)
sys.exit(1)
"""


async def test_a_log_with_much_output_stays_within_its_bound(tmp_path: Path) -> None:
    for part in ("logs", "settings"):
        (tmp_path / part).mkdir()
    (tmp_path / "chatty.py").write_text(CHATTY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    launcher = Launcher(folder=tmp_path, secrets={secret.value: "s" for secret in Secret}, environment=environment)
    running = await launcher.start(Component(name="tools-0", role=Role.TOOLS, module="chatty"))
    path = launcher.log_path("tools-0")
    most = 0
    waiting = asyncio.create_task(running.wait())
    while not waiting.done():
        most = max(most, held(path))
        await asyncio.wait([waiting], timeout=0.05)
    assert await waiting == 1
    assert most <= LOG_BYTES
    assert LOG_BYTES / 2 <= held(path) <= LOG_BYTES
    assert last_error(path) == "the last words"


def test_logs_follow_prints_every_line_over_rotations(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "job-1")
    lock = run.lock()
    assert lock is not None
    (run.path / "logs").mkdir()
    (run.path / "job.json").write_text("{}")
    log, late = Log(run.path / "logs" / "tools-0.log", 4000), run.path / "logs" / "judge-0.log"
    log.write(b"before\n")
    command = [sys.executable, "-m", "kestrl._app.cli.main", "logs", "job-1", "--follow", "-n", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "tools-0 | before\n"
            for number in range(400):
                log.write(b"line %04d\n" % number)
                if number % 100 == 99:  # as fast as a reader that looks a few times a second keeps up with
                    assert [reader.stdout.readline() for _ in range(100)][-1] == f"tools-0 | line {number:04d}\n"
            late.write_text("a component that starts later\n")
            assert reader.stdout.readline() == "judge-0 | a component that starts later\n"
            os.close(lock)
            assert reader.wait(30) == 0
        finally:
            reader.kill()
            log.close()


def test_the_last_lines_come_from_both_halves(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    older(path).write_text("one\ntwo\n")
    path.write_text("three\n")
    assert tail(path, LOG_BYTES).decode().splitlines()[-2:] == ["two", "three"]
    assert tail(tmp_path / "nowhere.log", 10) == b""
    assert logs.LOG_BYTES == 8 * 1024 * 1024
