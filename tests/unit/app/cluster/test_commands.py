"""`kestrl -n NAMESPACE`: what is asked of kubectl, and what is printed. `tests/e2e/test_cli.py` has a real kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.program import run_program

from kestrl._app.cluster.kubectl import ClusterRefused, refusal
from kestrl._app.cluster.printing import run_address, status_lines
from kestrl.errors import UserInputError

STATUS = {
    "shown": {"phase": "Degraded", "step": "3/9", "policy": "v3", "reason": "OOMKilled: job-inference-0"},
    "conditions": [{"type": "Accepted", "status": "True", "reason": "Valid", "message": ""}],
    "engines": [{"name": "job-inference-0", "state": "serving", "version": "job-v3"}],
    "progress": {"failures": {"tool/tool_timeout": 2}},
    "policy": {"uri": "s3://runs/a/job-1/adapters/3"},
    "lastCrash": {"pod": "job-learner-0", "container": "learner", "reason": "Error", "code": 1, "log": "\x1b[2J"},
}
JOB: dict[str, Any] = {"metadata": {"name": "job"}, "status": STATUS}


def printed(*arguments: str, code: int = 0) -> str:
    """What the program prints; the error if it ends with another code than 0."""
    done = run_program(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else " ".join(done.stderr.split())


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that notes its arguments, and prints the job."""
    program, asked = tmp_path / "kubectl", tmp_path / "asked"
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncat {tmp_path}/job.json\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return asked


def test_a_job_is_asked_for_by_namespace_and_context(kubectl: Path) -> None:
    assert printed("-n", "team-a", "--context", "prod", "status", "job").startswith("job  phase Degraded  step 3/9")
    expected = "--namespace=team-a --context=prod get agentrljobs.kestrl.dev job --output=json --request-timeout=30s"
    assert kubectl.read_text().splitlines() == [expected]


def test_a_job_is_suspended_and_resumed(kubectl: Path) -> None:
    printed("-n", "team-a", "suspend", "job")
    printed("-n", "team-a", "resume", "job")
    patches = [line.partition("--patch=")[2].partition(" --request")[0] for line in kubectl.read_text().splitlines()]
    assert [json.loads(patch) for patch in patches] == [{"spec": {"suspend": True}}, {"spec": {"suspend": False}}]


def test_what_only_a_machine_has_is_refused_with_what_there_is() -> None:
    assert "jobs of a cluster have the commands status, logs" in printed("-n", "team-a", "run", "job.yaml", code=2)


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl is not on the PATH" in printed("-n", "team-a", "status", "job", code=2)


def test_the_lines_have_no_control_characters() -> None:
    lines = list(status_lines(JOB))
    assert lines[1] == "reason: OOMKilled: job-inference-0"
    assert "engine job-inference-0: serving, job-v3" in lines
    assert "failures tool/tool_timeout: 2" in lines
    assert not any("\x1b" in line for line in lines)


def test_a_runs_folder_is_that_of_its_policy() -> None:
    assert run_address(JOB) == "s3://runs/a/job-1"
    with pytest.raises(UserInputError, match="has published no policy yet"):
        run_address({"metadata": {"name": "job"}})


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ('E1128 07:47:08 x.go:2] "x"\nThe connection to the server was refused', ClusterRefused, "The connection to"),
        ('Error from server (NotFound): agentrljobs.kestrl.dev "x" not found', UserInputError, "Error from server"),
        ("Error from server (Forbidden): not you", ClusterRefused, "Error from server (Forbidden)"),
        ("", ClusterRefused, "kubectl failed"),
    ],
)
def test_an_error_of_kubectl_is_kept_without_its_log(said: str, kind: type[Exception], text: str) -> None:
    error = refusal(said)
    assert type(error) is kind
    assert str(error).startswith(text)
