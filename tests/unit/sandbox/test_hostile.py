"""Hostile programs, each with its verdict; `kestrl sandbox check` runs the same table on a user's node."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kestrl_sandbox.checks.hostile import CHECKS
from kestrl_sandbox.checks.neighbours import neighbours, orphans, sessions, shortage
from kestrl_sandbox.checks.verdicts import PRELUDE, Check, examine_one
from kestrl_sandbox.contract import Language, Outcome, Run
from kestrl_sandbox.pool.sandbox_pool import SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.area}: {check.name}")
async def test_a_hostile_program_is_held(pool: SandboxPool, check: Check) -> None:
    verdict = await examine_one(pool, check)
    assert verdict.problem == ""
    assert verdict.seconds < check.seconds + 30


async def test_neighbours_do_not_see_each_other(pool: SandboxPool) -> None:
    assert (await neighbours(pool)).problem == ""


async def test_a_neighbour_gets_what_another_takes_of_the_node(pool: SandboxPool) -> None:
    assert (await shortage(pool)).problem == ""


async def test_a_daemon_ends_with_the_run_that_it_belongs_to(pool: SandboxPool) -> None:
    assert (await orphans(pool)).problem == ""


UNPROTECTED = [
    check
    for check in CHECKS
    if check.name.startswith(("the call ", "disks: "))
    or check.name
    in {
        "request_key",
        "sockets of the supervisor",
        "connections of the node",
        "names of sockets",
        "name of the host",
        "name of the host that modules remember",
        "instances of inotify",
        "contexts of asynchronous input and output",
        "buffers of pipes",
        "descriptors in flight",
        "leases of files",
        "notices of folders",
    }
]


@pytest.mark.parametrize("check", UNPROTECTED, ids=lambda check: check.name)
async def test_a_check_does_not_hold_where_there_is_no_sandbox(check: Check, tmp_path: Path) -> None:
    """Outside, the kernel answers each call, and a neighbour's socket and the node's names are there."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0kestrl-{server.getsockname()[1]}")
        named.listen()
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", PRELUDE + check.code.replace("/work/x", str(tmp_path / "x"))],
            stdout=subprocess.PIPE,
            pass_fds=[server.fileno()],
            text=True,
            check=False,
        )
    assert "BREACH" in ended.stdout, ended.stdout


async def test_a_call_of_a_session_that_follows_a_hostile_one_is_right_or_says_that_it_is_gone(
    pool: SandboxPool,
) -> None:
    assert [verdict.problem async for verdict in sessions(pool) if not verdict.held] == []


@pytest.mark.parametrize("folder", ["/tmp", "/var/tmp", "/dev/shm", "/work"])
async def test_nothing_is_left_for_the_next_run(pool: SandboxPool, folder: str) -> None:
    for _ in range(3):
        run = Run(code=f"ls -A {folder}; echo x > {folder}/left; mkdir -p {folder}/d", language=Language.BASH)
        result = await pool.run(run)
        assert (result.outcome, result.stdout) == (Outcome.OK, b"")


async def test_a_changed_interpreter_is_not_the_next_runs(pool: SandboxPool) -> None:
    change = (
        "import sys, json, builtins, os\njson.dumps = print = None\nbuiltins.len = None\n"
        "sys.modules['x'] = 1\nos.environ['X'] = '1'"
    )
    look = "import json, sys, os\nprint(json.dumps([1]), len('ab'), 'x' in sys.modules, 'X' in os.environ)"
    for _ in range(10):  # more often than there are sandboxes
        await pool.run(Run(code=change))
        assert (await pool.run(Run(code=look))).stdout == b"[1] 2 False False\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('BREACH')", "BREACH"),
        ("import time; time.sleep(60)", "timeout"),
        ("raise SystemExit(0)", "did not get to its attempt"),
    ],
)
async def test_a_check_reports_what_was_wrong(pool: SandboxPool, code: str, reason: str) -> None:
    verdict = await examine_one(pool, Check(area="test", name="test", code=code, seconds=1))
    assert reason in verdict.problem
    assert not verdict.held
