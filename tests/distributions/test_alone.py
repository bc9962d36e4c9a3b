"""Every distribution, as a release has it (a wheel built from its sdist), installed alone with what the lock gives it,
starts in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._app.engines.interpreter import engine_python
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl._shared.spec import parse_job
from kestrl._shared.spec.inference import Inference

pytestmark = [pytest.mark.distributions, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
UV = ROOT / ".tools" / "bin" / "uv"
SERVICES = {"kestrl-tools": "tools-0", "kestrl-judge": "judge-0", "kestrl-inference": "inference-0"}
"""Services that start without a model and serve until SIGTERM."""
READERS = {"kestrl-rollout": "rollout-0", "kestrl-learner": "learner-0"}
"""Programs that read the model first: without it they exit with code 2 and name it."""
MANIFEST: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/nowhere/model"},
        "data": {"train": {"uri": "train.jsonl"}},
        "tools": [{"name": "calculator", "use": "kestrl_tools.calculator:calculator"}],
        "rewards": [{"rule": "format"}],
        "algorithm": {"groupsPerStep": 1},
    },
}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    ended = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "scripts" / "release.py", "--distributions", "--out", folder)
    return folder


def installed(name: str, wheels: Path, folder: Path, *extras: str) -> Path:
    """The interpreter of an environment with one distribution, the library, and their dependencies by the lock."""
    python = folder / "env" / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", "3.11", folder / "env")
    listed = run(
        UV,
        "export",
        "--frozen",
        "--no-default-groups",
        "--no-emit-workspace",
        "--no-hashes",
        "--quiet",
        "--package",
        name,
        *(f"--extra={extra}" for extra in extras),
    )
    (folder / "requirements.txt").write_text(listed)
    distributions = ("kestrl", name, *(("kestrl-demo-models",) if name == "kestrl-email" else ()))
    own = [path for path in wheels.glob("*.whl") if path.name.partition("-")[0].replace("_", "-") in distributions]
    install = (UV, "pip", "install", "--quiet", "--no-deps", "--python", python)
    run(*install, "--requirements", folder / "requirements.txt")
    run(*install, *own)
    return python


def component(name: str, folder: Path, port: int) -> Component:
    def endpoint(role: Any, index: int) -> ReplicaEndpoint:
        return ReplicaEndpoint(bind="127.0.0.1", host="127.0.0.1", port=port)

    rows = folder / "train.jsonl"
    rows.write_text(json.dumps({"id": "1", "question": "?", "ground_truth": "1"}) + "\n")
    site = Site(
        run="job-1",
        endpoint=endpoint,
        model="/nowhere/model",
        template=None,
        train=str(rows),
        validation=None,
        storage=str(folder / "store"),
        database=f"sqlite:///{folder}/ledger.db",
        work_dir=str(folder / "work"),
    )
    return next(item for item in plan(parse_job(MANIFEST), site) if item.name == name)


def started(python: Path, item: Component, folder: Path) -> subprocess.Popen[str]:
    assert item.settings is not None
    (folder / "settings.json").write_text(item.settings.model_dump_json())
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environment |= dict.fromkeys((secret.value for secret in Secret), "secret")
    command = [str(python), "-I", "-m", item.module, "--settings", str(folder / "settings.json")]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_alone_serves_and_ends_on_sigterm(name: str, wheels: Path, tmp_path: Path) -> None:
    port = free_port()
    process = started(installed(name, wheels, tmp_path), component(SERVICES[name], tmp_path, port), tmp_path)
    assert process.stderr is not None
    while process.poll() is None:  # each refused connection is one look; the test's own timeout bounds them
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors


@pytest.mark.parametrize("name", READERS)
def test_a_program_alone_names_the_model_that_is_missing(name: str, wheels: Path, tmp_path: Path) -> None:
    process = started(installed(name, wheels, tmp_path), component(READERS[name], tmp_path, free_port()), tmp_path)
    errors = process.communicate(timeout=120)[1]
    assert (process.returncode, "model.base" in errors) == (2, True), errors


def answer(python: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What a command printed, and its exit code."""
    program = [str(python), *command]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("name", "extras", "command", "expected"),
    [
        ("kestrl", ["cli"], ["-m", "kestrl._app.cli.main", "version"], ""),
        ("kestrl-operator", [], ["-m", "kestrl_operator", "--config", "/nowhere/config.yaml"], "/nowhere/config.yaml"),
        ("kestrl-email", ["cli"], ["-m", "kestrl._app.cli.main", "email", "--help"], ""),
        ("kestrl-sandbox", ["cli"], ["-m", "kestrl._app.cli.main", "sandbox", "serve", "--help"], ""),
        ("kestrl-sandbox", [], ["-m", "kestrl_sandbox", "--host", "0.0.0.0"], "set KESTRL_SANDBOX_TOKEN"),
    ],
)
def test_a_command_alone_answers(
    name: str, extras: list[str], command: list[str], expected: str, wheels: Path, tmp_path: Path
) -> None:
    ended = answer(installed(name, wheels, tmp_path, *extras), tmp_path, *command)
    assert "ModuleNotFoundError" not in ended.stderr
    assert (ended.returncode, expected in ended.stderr) == (2 if expected else 0, True), ended.stderr


def test_the_program_without_its_extra_names_what_to_install(wheels: Path, tmp_path: Path) -> None:
    python = installed("kestrl", wheels, tmp_path)
    ended = answer(python, tmp_path, "-c", "from kestrl._app.program import main; main()")
    assert ended.returncode == 2
    assert ended.stderr == "error: the program kestrl needs the package typer: pip install 'kestrl[cli]'\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["doctor"], "pip install 'kestrl[local]'"),
        (
            ["run", "job.yaml"],
            "kestrl-tools: not installed, which a run on this machine needs; pip install",
        ),
        (["sft", "sft.yaml"], "kestrl-learner: not installed"),
        (["email"], "kestrl email is not installed; pip install 'kestrl[email]'"),
        (["sandbox", "check"], "kestrl sandbox is not installed; pip install 'kestrl[local]'"),
        (["new", "mine"], ""),
    ],
)
def test_the_program_without_the_services_names_what_to_install(
    command: list[str], expected: str, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(MANIFEST))
    ended = answer(program, tmp_path, "-m", "kestrl._app.cli.main", *command)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2 if expected else 0, False), ended.stderr
    assert expected in " ".join((ended.stdout + ended.stderr).split())


@pytest.fixture(scope="session")
def program(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the program alone."""
    return installed("kestrl", wheels, tmp_path_factory.mktemp("program"), "cli")


@pytest.mark.share
def test_everything_for_one_machine_comes_from_the_registry_and_trains_a_job_of_ones_own(
    wheels: Path, tmp_path: Path
) -> None:
    """`kestrl[local]` is resolved by the registry alone: without the lock and its overrides. The engine is the one that
    `make setup` installs, named as any interpreter is.
    """
    environment, place = tmp_path / "bare environment", tmp_path / "my place"
    place.mkdir()
    python = environment / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", "3.11", environment)
    # torch as in the lock, which is in uv's cache; without the line it is the newest one.
    pinned = ("--constraint", tmp_path / "torch.txt")
    (tmp_path / "torch.txt").write_text(f"torch=={version('torch')}\n")
    install = (UV, "pip", "install", "--quiet", "--no-config", "--python", python, "--find-links", wheels, *pinned)
    run(*install, "kestrl[local]", cwd=tmp_path)
    program = environment / "bin" / "kestrl"
    run(program, "new", "my job", cwd=place)
    job = place / "my job" / "job.yaml"
    run(program, "validate", job, cwd=place)
    engine = engine_python(Inference(), tmp_path)
    assert engine is not None
    run(program, "run", job, "--engine-python", engine, "--set", "schedule.maxSteps=2", cwd=place)
    summary = json.loads(next(place.glob("runs/*/summary.json")).read_text())
    assert (summary["status"], summary["steps"]) == ("succeeded", 2)
