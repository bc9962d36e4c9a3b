"""Run folders: which run is resumed, who holds it, what a dead one says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.local.files import write_atomic
from kestrl._app.local.rundir import RECORD, RunDir, find_run, make_folders, open_run
from kestrl._app.local.runner_record import ComponentRecord, RunnerRecord, RunnerRecordFile
from kestrl._app.local.site import listeners, reserved_ports, storage_address
from kestrl._shared.spec import AgentRLJob, parse_job, with_overrides
from kestrl.errors import UserInputError
from kestrl.runstate.state import Activity, RunState, Steps
from kestrl.runstate.states import ComponentState, RunPhase
from kestrl.storage.layout import SUMMARY

ROOT = Path(__file__).resolve().parents[4]
MANIFEST: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/m"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "format"}],
        "inference": {"replicas": 2},
    },
}


def job_with(*overrides: str) -> AgentRLJob:
    return parse_job(with_overrides(MANIFEST, overrides))


def finish(run: RunDir, status: str) -> None:
    write_atomic(run.summary_path, json.dumps({"status": status}))


def opened(root: Path, *overrides: str, new: bool = False) -> tuple[str, bool]:
    run, resumed = open_run(root, job_with(*overrides), new=new)
    make_folders(run, job_with(*overrides), root)
    return run.id, resumed


def test_an_unfinished_run_of_the_same_job_is_resumed(tmp_path: Path) -> None:
    assert opened(tmp_path) == ("job-1", False)
    assert opened(tmp_path) == ("job-1", True)
    finish(RunDir(tmp_path / "job-1"), "failed")
    assert opened(tmp_path) == ("job-1", True)
    finish(RunDir(tmp_path / "job-1"), "succeeded")
    assert opened(tmp_path) == ("job-2", False)
    assert opened(tmp_path, new=True) == ("job-3", False)


def test_another_job_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    assert opened(tmp_path) == ("job-1", False)
    assert opened(tmp_path, "algorithm.learningRate=0.5") == ("job-2", False)
    assert opened(tmp_path, "algorithm.learningRate=0.5", "inference.replicas=1") == ("job-2", True)


def test_only_one_runner_holds_a_run(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, job_with(), new=False)
    code = "import sys; from kestrl._app.local.rundir import RunDir; from pathlib import Path\n"
    code += "handle = RunDir(Path(sys.argv[1])).lock(); print(handle is not None, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert run.lock() is None
        assert run.runner_pid() == holder.pid
        holder.kill()
        holder.wait()
        assert run.runner_pid() is None
        handle = run.lock()
        assert handle is not None
        os.close(handle)


def test_runs_are_found_by_id_or_as_the_latest(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="there is no run in"):
        find_run(tmp_path, None)
    opened(tmp_path)
    opened(tmp_path, new=True)
    assert find_run(tmp_path, None).id == "job-2"
    assert find_run(tmp_path, "job-1").id == "job-1"
    with pytest.raises(UserInputError, match=r"no run 'x' .*there are: job-1, job-2"):
        find_run(tmp_path, "x")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match=r"cannot be made: .*--runs"):
        opened(tmp_path / "file")


def test_storage_is_the_runs_folder_unless_the_job_names_another(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-1")
    assert storage_address(job_with(), run, tmp_path) == run.path.as_uri()
    assert storage_address(job_with("storage.uri=s3://bucket/x/"), run, tmp_path) == "s3://bucket/x/job-1"
    assert storage_address(job_with("storage.uri=store"), run, tmp_path) == (tmp_path / "store" / "job-1").as_uri()
    assert storage_address(job_with("storage.uri=file:///x"), run, tmp_path) == "file:///x/job-1"


def test_every_replica_gets_a_port_of_its_own() -> None:
    with reserved_ports(job_with(), None) as ports:
        assert len(set(ports.values())) == len(ports) == len(list(listeners(job_with()))) == 14


def test_a_port_of_a_run_is_its_components_alone() -> None:
    with reserved_ports(job_with(), None) as ports:
        for port in ports.values():
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind(("127.0.0.1", port))
            for _ in range(2):  # a component, and the same component started again
                with socket.create_server(("127.0.0.1", port)) as component:  # with SO_REUSEADDR, as all servers
                    component.listen()


CONNECTIONS = """
import socket
from pathlib import Path
from kestrl._app.local.site import reserved_ports
from tests.unit.app.local.test_rundir import job_with

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40015")
server = socket.create_server(("127.0.0.1", 9))
with reserved_ports(job_with(), 40000) as reserved:
    with socket.create_connection(("127.0.0.1", 9)) as connection:
        print(len(reserved), connection.getsockname()[1])
"""


def test_no_connection_gets_a_port_of_a_run() -> None:
    """In a network of its own, whose connections may have 16 ports: Linux looks at an even number of them."""
    inside = ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-c", CONNECTIONS]
    printed = subprocess.run(inside, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    reserved, port = map(int, printed.split())
    assert (reserved, port in {40014, 40015}) == (14, True)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = pytest.raises(UserInputError, match=f"--base-port {port}: port {port} for engine-0 is taken")
        with refused, reserved_ports(job_with(), port):
            pass


def test_the_runners_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.record() is None
    state = RunState(activity=Activity(phase=RunPhase.TRAINING), steps=Steps(done=3, total=9))
    file = RunnerRecordFile(tmp_path / RECORD, RunnerRecord(run="job-1", job="job", pid=7))
    seen = ComponentRecord(
        state=ComponentState.RUNNING, pid=8, ports={"grpc": 1}, restarts=2, last_exit=None, last_error=""
    )
    file.update(components={"learner-0": seen}, state=state)
    file.update(ended=1, reason="x")
    delayed = run.record()
    assert delayed is not None
    assert delayed.ended is None
    file.flush()
    found = run.record()
    assert found is not None
    assert (found.ended, found.reason, found.components) == (1, "x", {"learner-0": seen})
    assert found.state == state
    assert found.updated_at >= found.started_at > 0


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (RECORD, '{"components": {"a": {"state": "?"}}}', "is damaged"),
        (RECORD, '{"version": 2}', "later version of KestRL: its runner's record has version 2"),
        (SUMMARY, '{"status": "?"}', "is damaged"),
        (SUMMARY, '{"version": 2, "status": "failed"}', "later version of KestRL: its summary has version 2"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserInputError, match=f"{name}.*{why}"):
        RunDir(tmp_path).record() if name == RECORD else RunDir(tmp_path).summary()
