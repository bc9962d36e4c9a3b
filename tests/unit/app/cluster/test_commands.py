"""What `kestrl -n NAMESPACE` asks of kubectl and prints; `tests/e2e/jobs/test_cli.py` has a real kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stored_runs import make_group
from tests.program import run_program
from typer import Context

from kestrl._app.cli.commands import ON_CLUSTER, Commands
from kestrl._app.cluster.kubectl import ClusterRefused, refusal
from kestrl._app.cluster.printing import run_address, status_lines, suspension_line
from kestrl.episode import Purpose
from kestrl.errors import UserInputError
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS, digest
from kestrl.storage.episodes import EpisodeBatch, ObjectEpisodeStore

STATUS = {
    "shown": {"phase": "Degraded", "step": "3/9", "policy": "v3", "reason": "OOMKilled: job-inference-0"},
    "conditions": [{"type": "Accepted", "status": "True", "reason": "Valid", "message": ""}],
    "engines": [{"name": "job-inference-0", "state": "serving", "version": "job-v3"}],
    "progress": {"failures": {"tool/tool_timeout": 2}},
    "policy": {"uri": "s3://runs/a/job-1/adapters/3"},
    "lastCrash": {"pod": "job-learner-0", "container": "learner", "reason": "Error", "code": 1, "log": "\x1b[2J"},
}
JOB: dict[str, Any] = {"metadata": {"name": "job"}, "spec": {"suspend": True}, "status": STATUS}


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
    patches = [line.partition("--patch=")[2].partition(" --output")[0] for line in kubectl.read_text().splitlines()]
    assert [json.loads(patch) for patch in patches] == [{"spec": {"suspend": True}}, {"spec": {"suspend": False}}]


@pytest.fixture
def stored(kubectl: Path, tmp_path: Path) -> Path:
    """The folder of the job's run, which has a group and the adapter of step 1."""
    folder = tmp_path / "store" / "job-1"
    store = open_store(folder.as_uri())
    ObjectEpisodeStore(store).append(EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=[make_group("job-1/1")]))
    files = {WEIGHTS: b"weights", "adapter_config.json": b"{}"}
    adapter = AdapterManifest(
        job="job",
        step=1,
        sha256=digest(b"weights"),
        files={name: digest(content) for name, content in files.items()},
        base_model="/m",
        rank=8,
        alpha=16,
        targets=("q_proj",),
        parent=None,
        probe=Probe(token_ids=(1,), logprobs=(), base_logprobs=()),
    )
    publish_adapter(store, files, adapter)
    spec = {"model": {"base": "pvc://models/base"}, "data": {"train": {"uri": "s3://data/train.jsonl"}}}
    status = {"policy": {"uri": f"{folder.as_uri()}/adapters/000001-abc"}}
    kubectl.with_name("job.json").write_text(json.dumps({**JOB, "spec": spec, "status": status}))
    return folder


def test_the_page_and_the_adapter_of_a_job_come_from_its_folder_in_storage(stored: Path, tmp_path: Path) -> None:
    pages, adapter = tmp_path / "pages", tmp_path / "adapter"
    assert "pages in" in printed("-n", "team-a", "ui", "job", "--export", str(pages))
    assert "shelf" in "".join(path.read_text() for path in pages.rglob("*.html"))
    assert f"-> {adapter}" in printed("-n", "team-a", "export", "job", "--out", str(adapter))
    assert (adapter / WEIGHTS).read_bytes() == b"weights"
    assert "exists already" in printed("-n", "team-a", "export", "job", "--out", str(adapter), code=2)
    merged = printed("-n", "team-a", "export", "job", "--out", str(tmp_path / "merged"), "--merge", code=2)
    assert "spec.model.base" in merged, "a claim of the cluster is not here"


def test_what_only_a_machine_has_is_refused_with_what_there_is() -> None:
    assert "jobs of a cluster have the commands status, logs" in printed("-n", "team-a", "run", "job.yaml", code=2)


def test_help_of_the_plugin_lists_what_it_has() -> None:
    app = Commands(name="kestrl")
    listed = app.list_commands(Context(app, obj=True))
    assert listed == list(ON_CLUSTER)
    assert all(app.get_command(Context(app, obj=True), name) for name in listed)
    assert "run" in app.list_commands(Context(app, obj=False))


def test_what_only_a_cluster_has_is_refused_without_a_namespace() -> None:
    assert "kestrl -n NAMESPACE suspend JOB" in printed("suspend", "job", code=2)


@pytest.mark.parametrize(
    ("phase", "suspended", "text"),
    [
        ("Running", True, "job finishes its step, writes a checkpoint"),
        ("Suspended", False, "job is to run, from its last checkpoint"),
        ("Succeeded", True, "job has ended (Succeeded)"),
    ],
)
def test_the_line_after_a_change_says_what_follows(phase: str, suspended: bool, text: str) -> None:
    job = {"metadata": {"name": "job"}, "spec": {"suspend": suspended}, "status": {"shown": {"phase": phase}}}
    assert suspension_line(job).startswith(text)


def test_errors_of_logs_that_fill_a_pipe_end_the_command(kubectl: Path) -> None:
    errors = "head -c 300000 /dev/zero | tr '\\0' x >&2; exit 1"
    script = f'#!/bin/sh\ncase "$*" in *" logs "*) {errors};; esac\ncat {kubectl.with_name("job.json")}\n'
    kubectl.with_name("kubectl").write_text(script)
    assert "cluster_refused" in printed("-n", "team-a", "logs", "job", code=1)


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
    ("printed_errors", "kind", "text"),
    [
        (
            'E1128 07:47:08 x.go:2] "x"\nThe connection to\nthe server was refused',
            ClusterRefused,
            "The connection to the",
        ),
        ('Error from server (NotFound): agentrljobs.kestrl.dev "x" not found', UserInputError, "Error from server"),
        ("Error from server (Forbidden): not you", ClusterRefused, "Error from server (Forbidden)"),
        ("", ClusterRefused, "kubectl failed"),
    ],
)
def test_an_error_of_kubectl_is_kept_without_its_log(printed_errors: str, kind: type[Exception], text: str) -> None:
    error = refusal(printed_errors)
    assert "\n" not in str(error)
    assert type(error) is kind
    assert str(error).startswith(text)
